"""The files of a store: store.json, records, dense weights, calibration; their readers and their writer."""
