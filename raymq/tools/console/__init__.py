"""The web console: pages and JSON about a cluster, for people with a browser.

    app.py      create_app(backend, settings): the ASGI application
    backend/    every question and order of the pages, as a protocol of plain values; needs no Ray
    security/   login, sessions, roles, where changes may come from, headers
    web/        bounded calls, cached lists, rates over time, rendering, changes with their audit, export
    pages/      the pages, a module per noun
    templates/, static/    markup, one style sheet, a little JavaScript; static/vendor/ is third-party

The application never calls Ray: it is given a Backend. Calls run in a bounded pool of threads with a timeout each, so
that a server that is slow or dead makes its rows "no answer" and never a blank page.
"""
