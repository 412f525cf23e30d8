"""Access control: users, policies, signed requests and quotas. These modules use no Ray, no clock and no thread of
their own.

Access control is off by default. If it is on, each request has a signature (signatures.py), from which the server
derives the user (authenticate.py). The table of requests (requests.py) lists the actions and resources that each
request needs. The user's policies decide if the request is allowed (decide.py). Users and policies are one value,
AuthState (state.py). Servers get this value when they start (users_file.py reads it from a file). The rules follow
RocketMQ's ACL 2.0 (spec/features.md §8). acl1.py converts files of ACL 1.0 to files of users and policies.

Modules: users, policies (resources, actions, entries), addresses, state, users_file, decide, requests, credentials
(client side), signatures, authenticate (server side), quotas, acl1. To change the permissions that a request needs,
change requests.
"""
