"""The Python interface by which users write their own training flow, and an example of all of it.

    interface.py ──► docs: the page "Your own flow", with signatures and contracts from the code
    example/     ──► the same page, and `headway new flow DIR`

The invariant: `interface.py` names everything that users import from Headway. A test holds the signatures of these
names, so that they change only on purpose.
"""
