"""Hooks of a store: the operator's functions that see stored messages (store.put_hooks) and fetched messages
(store.consume_hooks). A store without hooks runs none of this code: it chooses when it opens.
"""
