"""The message store on one disk: RocketMQ's files (spec/storage.md), written and recovered without Ray.

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
    index.mended                          keys of damaged records that were mended after the index had passed them
    lost+cut/00000000000000184232         copies of what recovery cut off the log's end
    dedup                                 a snapshot of the producers' sequences, so that recovery need not walk far
    reserve                               space for the broker's state on a full disk
    fatal                                 the stack of a process that ended by a fatal error, such as SIGBUS
    abort                                exists while the store is open; if it exists at open, the store had crashed
    lock                                  locked for as long as the store is open
    config/*.json                         the broker's own files (topics, offsets …), with a .bak of each
    config/delayOffset.json               the progress in delivering delayed messages (also timerOffset.json)

The commit log is the truth. Consume queues, the index, and the table that recognises messages sent twice are made from
the log and can be rebuilt from it.

An append checks its batches (put_check.py). Then, under one lock: recognise messages that an earlier send stored
(dedup.py), plan their spans in the log (append_plan.py), make the files and pages they need (CommitLog.reserve), copy
the records into the log's map, the first 8 bytes last, fill in the offsets there (log_writer.py), and write the queues'
units (consume_queue.py). A single message reaches the same bytes in fewer steps (Appender._append_record). The append
is then started. Any thread that asks settles the append, outside the lock, after the flush thread (flush_service.py)
and the replicas have it (durability.py).

Consumers see a message once it is on disk (SYNC_FLUSH) or written (ASYNC_FLUSH): visibility.py. Written means in the
files: with a transient store pool (pool_writer.py, off by default) records are in memory first, and commit_service.py
writes them.

The files of log and queues are written through maps (log_writer.py, write_handles.py) and read through read-only maps
(raymq.records.logfiles.log_reader). A file's blocks are allocated before it is mapped, so a store into it needs nothing
more from the disk; if the file system cannot promise that (disk.map_for_writing), files are written with pwrite. With
ASYNC_FLUSH the log's pages are made ahead of the writer.

Each option is a part of its own, chosen once when the store opens: the log's writer (CommitLog.of), the class of each
queue (QueueTable), the directories of the log (LogPaths, and file_maps.py for readers). Appends, flushes and fetches do
not test for options.

After a crash, recovery.py walks the newest part of the log, cuts the log after the last good record and brings the
queues in line with the log. Damaged records before that are kept (log_end.py) until mend.py gets them from another
replica.

The index (index_service.py) follows the log in a thread of its own. Retention (rules.py decides, cleaner.py does)
deletes the oldest log files, and the queue and index files that only lead to them. log_chunks.py, chunk_appender.py and
epoch_file.py are for replication: the log as bytes, and the master that wrote each part of it.
"""
