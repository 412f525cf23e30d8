"""Commands that manage the whole cluster and its processes: `raymq up`, `down`, `status`, `demo`, `store`, …"""
