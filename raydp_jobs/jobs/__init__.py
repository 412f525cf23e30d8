"""Finished jobs on topics. Each job is a module with a command, a `main`, and an entry under `raymq job`.

    topic_stats.py      statistics of topics: counts, bytes, rates, tags and keys over time; topic_figures.py shows them
    archive.py          a topic as Parquet files by day; later runs continue it. archive_files.py defines the names
                        of the files, archive_writer.py writes them, archive_check.py checks them
    replay.py           Parquet files sent to a topic again, each row once; replay_source.py defines the order
    dead_letters.py     why and when messages became dead letters, by consumer group
    windowed_counts.py  counts of a message stream in time windows, sent to another topic
    spark_job.py        the connection, the Spark session, the progress and the errors of a job that needs Spark
    times.py            the times that jobs take as options
    pictures.py         the pictures of jobs

A job has a function `run` for programs and tests, which takes the job's inputs and returns its result. The command
parses options, calls `run` and prints the result.
"""
