"""Finished jobs on topics, each a file with a command and a `main`, and an entry under `raymq job`.

    topic_stats.py      figures of topics: counts, bytes, rates, tags and keys over time; with a picture
    archive.py          a topic as Parquet files by day, which later runs go on with
    dead_letters.py     why and when messages died, by consumer group
    replay.py           Parquet files sent to a topic again, each row once
    spark_job.py        the connection, the Spark session, the progress and the errors of a job that needs Spark
    pictures.py         the pictures of jobs

A job has a function `run`, which takes what it works on and returns its result, for programs and tests; its command
parses options, calls `run` and prints.
"""
