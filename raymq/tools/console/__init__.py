"""The web console: pages and JSON about a cluster, for people with a browser.

    app.py      create_app(cluster, settings): the ASGI application
    cluster.py  the cluster that the pages show: its administration, a producer, and the control of its actors
    security/   login, sessions, roles, where changes may come from, headers
    web/        bounded calls, cached lists, rates over time, rendering, changes with their audit, export
    pages/      the pages, a module per noun
    templates/, static/    markup, one style sheet, a little JavaScript; static/vendor/ is third-party

The application is created with a ConsoleCluster and imports no Ray. Calls to the cluster run in a bounded pool of
threads, each with a timeout. If a server is slow or dead, its rows show "no answer", and the rest of the page works.
"""
