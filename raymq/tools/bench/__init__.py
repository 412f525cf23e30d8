"""`raymq bench`: measures sends, reads and delays on a running raymq, with the figures of its disk and machine.

`plan.py` has the phases of a run and their limits, `latencies.py` percentiles, and `report.py` the table: pure
functions of plain values. `workload.py` has the loops of the phases and their threads, over any producer and consumer.
`run.py` connects them to a client, and removes the temporary topic and groups. `surroundings.py` measures the disk, and
collects facts about the machine and the broker groups.
"""
