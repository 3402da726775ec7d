"""The embedded server, and which user of any server may do what.

    embedded.py ──► access.py
    starts Valkey    the access control list and
    or Redis         the password of each role's user

`embedded.py` runs the server as a child of its caller, on a unix socket or on loopback, with its data in one directory.
`access.py` is also what `headway acl` prints for a server of the user's own. Clients need nothing of this folder.

The invariant: an embedded server obeys no client that has no password of its own, and each role's user may do only
what the role needs.
"""
