"""What operators run: admission, leases, intake, the ledger, REST, and the demo that starts everything."""
