"""Hooks of a store: functions of the operator that see what is stored and what is handed out (store.put_hooks,
store.consume_hooks). A store without hooks has none of this on its ways: it chooses when it opens.
"""
