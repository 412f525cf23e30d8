"""The message store on one disk: RocketMQ's files (spec/storage.md), written and recovered without Ray.

A store directory

    commitlog/00000000000000000000        every message of the store, in one log of equal-sized files
    commitlog/00000000001073741824            named after the physical offset of their first byte; or in several
                                              directories elsewhere, which take turns (log_paths.py)
    consumequeue/TOPIC/QUEUE/000…000      where the queue's messages are in the log: 20 bytes each
    batchconsumequeue/TOPIC/QUEUE/000…    the same for records that hold many messages each, which RocketMQ may write
    index/20261120180926228               which messages have a key, or a unique id: hash tables
    checkpoint                            up to which times log and queues are known to be on disk
    dedup                                 a snapshot of who sent what, so that recovery need not walk far
    abort                                 there while the store is open: found at open, it tells of a crash
    lock                                  locked for as long as the store is open
    config/*.json                         what the broker wants kept (topics, offsets …), with a .bak of each
    config/delayOffset.json               how far delayed messages are delivered (also timerOffset.json)

The commit log is the truth. Consume queues, and the table that recognises messages sent twice, are made from it and
can be made again. So can the index.

An append, under one lock: recognise what was sent before (dedup.py), choose places, fill in the offsets, write the
records (commit_log.py) and the queues' units (consume_queue.py). Then, outside the lock, wait for the flush thread
(flush_service.py). Consumers see a message once it is on disk (SYNC_FLUSH) or written (ASYNC_FLUSH): visibility.py.
Written means in the files: with a transient store pool (transient_store_pool.py, off by default) records are in memory
first, and commit_service.py writes them.

Files are written with pwrite and read through read-only maps (raymq.logfiles.log_reader). Writing through a map costs
more (a page fault each 4 KiB, and slower flushes), and turns a disk error into a SIGBUS instead of an OSError. But
where a thread has made the pages ahead of a fast writer (warm_up.py, ASYNC_FLUSH only), a store into them costs the
copy alone.

After a crash, recovery.py walks the newest part of the log, cuts it at the last good record and brings the queues in
line with it.

The index (index_service.py) follows the log in a thread of its own. Retention (rules.py decides, cleaner.py does)
deletes the oldest log files, and what only leads to them. log_chunks.py, chunk_appender.py and epoch_file.py are for
replication: the log as bytes, and which master wrote which part of it.
"""
