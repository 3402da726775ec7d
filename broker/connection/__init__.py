"""The connection to a server: its address, its nodes, shared round trips, and retries through outages.

    connection.py ─► function_library.py   the library of functions on the server, one for each run
         │           server_errors.py      errors of scripts and servers ─► Headway's errors
         ├─► routes.py ─► round_trips.py ─► server, or the node of a cluster that holds the key
         └─► address.py                    URL, user, password, TLS
    server_traits.py   the settings of a server: users, eviction, persistence

`broker/client/` names verbs; only this folder talks to a server, and only here errors of the driver are translated.

The invariant: a command may be sent twice, because its reply can be lost, so every verb is idempotent or harmless when
repeated. An outage ends at a deadline in BrokerUnavailableError.
"""
