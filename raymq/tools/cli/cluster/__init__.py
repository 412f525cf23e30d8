"""Commands about the cluster as a whole and its processes: `raymq up`, `down`, `status`, `demo`, `store`, …"""
