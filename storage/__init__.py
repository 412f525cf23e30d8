"""The message store on one disk: it writes and recovers RocketMQ's files (spec/storage.md) without Ray.

A store directory

    commitlog/00000000000000000000        every message of the store, in one log of equal-sized files
    commitlog/00000000001073741824            named after the physical offset of their first byte; or in several
                                              directories elsewhere, which take turns (log_paths.py)
    consumequeue/TOPIC/QUEUE/000…000      positions of the queue's messages in the log: 20 bytes each
    batchconsumequeue/TOPIC/QUEUE/000…    the same for records that hold many messages each, which RocketMQ may write
    index/20261120180926228               hash tables from keys and unique ids to messages
    checkpoint                            the store times up to which log and queues are known to be on disk
    holes                                 the damaged ranges of the log, if it has any
    index.sums                            the checksums of the index files
    index.mended                          keys of damaged records that were repaired after the index had passed them
    lost+cut/00000000000000184232         copies of what recovery cut off the log's end
    scrub                                 the progress of the periodic check of all files, and its last result
    dedup                                 a snapshot of the producers' sequences, which shortens recovery's log scan
    reserve                               space for the broker's state on a full disk
    fatal                                 the stack of a process that ended by a fatal error, such as SIGBUS
    abort                                 exists while the store is open; if it exists at open, the store had crashed
    lock                                  locked for as long as the store is open
    config/*.json                         the broker's own files (topics, offsets …), with a second copy of each, .bak
    *.damaged-1                           a copy of a small file that was damaged (two_copies.py)
    config/delayOffset.json               the progress in delivering delayed messages (also timerOffset.json and
                                          confirmedDeliveries.json)

The commit log is the source of truth. The store derives the consume queues, the index, and the table that recognises
messages sent twice from the log, and can rebuild them from the log.

An append checks its batches (put_check.py). After that, under one lock, the append
  recognises messages that an earlier send stored (dedup.py),
  plans the ranges of its records in the log (append_plan.py),
  creates the files and pages that the records need (CommitLog.reserve),
  copies the records into the log's map, the first 8 bytes last, and fills in the offsets (log_writer.py),
  and writes the queue units (consume_queue.py).
A single message is stored with the same bytes in fewer steps (Appender._append_record). At this point the append is
started but not complete. Any thread can complete the append, outside the lock, after the flush thread
(flush_service.py) and the replicas have stored the records (durability.py).

Consumers receive a message once the message is on disk (SYNC_FLUSH) or written (ASYNC_FLUSH): visibility.py. Written
means in the files. With a transient store pool (pool_writer.py, off by default) records are in memory first, and
commit_service.py writes them to the files.

The files of log and queues are written through maps (log_writer.py, write_handles.py) and read through read-only maps
(raymq.records.logfiles.log_reader). The blocks of a file are allocated before the file is mapped, so a write into the
map needs no more disk space. If the file system cannot promise that (disk.map_for_writing), files are written with
pwrite. With ASYNC_FLUSH the log's pages are prefaulted ahead of the writer.

Each option is an object of its own, chosen once when the store opens: the log's writer (CommitLog.of), the class of
each queue (QueueTable), the directories of the log (LogPaths, and file_maps.py for readers). Appends, flushes and
fetches do not test for options.

After a crash, recovery.py scans the newest part of the log, cuts the log after the last good record and makes the
queues consistent with the log. Damaged records before that record are kept (log_end.py) until mend.py gets them from
another replica.

A thread of the index (index_service.py) follows the log. Retention (rules.py decides, cleaner.py deletes) removes the
oldest log files, and the queue and index files that only point to removed log files. The scrubber (scrubber.py)
checks the store once in a period. log_chunks.py, chunk_appender.py and epoch_file.py are for replication: the log as
bytes, and the master that wrote each part of the log.
"""
