"""The board: see and steer a yard in the browser (docs/board.md).

It needs the extra ``board``; `tokenyard.board.app` is its ASGI application.
"""
