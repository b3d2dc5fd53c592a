"""The sentinel: every so many training calls one document of the batch is run alone, and compared."""
