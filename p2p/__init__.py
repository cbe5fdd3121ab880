"""How processes find, trust and feed each other: identities, wire, transport, snapshots, broadcast."""
