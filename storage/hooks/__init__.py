"""Hooks of a store: the operator's functions that receive stored messages (store.put_hooks) and fetched messages
(store.consume_hooks). A store decides when it opens whether it has hooks; without hooks it runs none of this code."""
