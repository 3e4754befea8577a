"""What can be done to a yard: each operation once, for the command line, the board and the audit.

An operation is a function with named parameters; `tokenyard.ops.operation.operation` makes it data.
The command line makes its options from the parameters, the board its form, the audit its details.
"""
