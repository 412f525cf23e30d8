"""Access: users, policies, signed requests, quotas. Pure: no Ray, no clock of its own, no thread.

Off by default. A request comes with a signature (signatures.py), which says who sends it (authenticate.py). The table
of requests (requests.py) says what it needs: actions on resources. The user's policies decide (decide.py). Users and
policies are one value, AuthState (state.py), which servers are started with (users_file.py reads it). The rules are
those of RocketMQ's ACL 2.0 (spec/features.md §8); files of ACL 1.0 can be made into such a file (acl1.py).

Modules: users, policies (resources, actions, entries), addresses, state, users_file, decide, requests, credentials (a
client's side), signatures, authenticate (a server's side), quotas, acl1. A change of what a request needs is in
requests.
"""
