"""The pages of the board: each is a function that reads, and a template that shows."""

from __future__ import annotations

from typing import Final

from tokenyard.board.page import Page
from tokenyard.board.pages.batches import view_batch, view_batches
from tokenyard.board.pages.dead import view_letter, view_letters
from tokenyard.board.pages.devices import view_devices, view_worker
from tokenyard.board.pages.models import view_model, view_models
from tokenyard.board.pages.request import view_request
from tokenyard.board.pages.requests import view_requests
from tokenyard.board.pages.signals import view_audit, view_signals
from tokenyard.board.pages.tenants import view_keys, view_tenant, view_tenants
from tokenyard.board.pages.yard import view_yard

#: In the order of the menu.
PAGES: Final = (
    Page("/", "Yard", "yard.html", view_yard, menu="Yard"),
    Page("/devices", "Devices", "devices.html", view_devices, menu="Devices"),
    Page("/devices/{worker}", "Worker", "device.html", view_worker),
    Page("/models", "Models", "models.html", view_models, menu="Models"),
    Page("/model", "Model", "model.html", view_model),
    Page("/requests", "Requests", "requests.html", view_requests, menu="Requests", every_s=5.0),
    Page("/request", "Request", "request.html", view_request, every_s=1.0),
    Page("/dead", "Dead letters", "dead.html", view_letters, menu="Dead letters", every_s=5.0),
    Page("/dead/{letter}", "Dead letter", "dead_one.html", view_letter, every_s=10.0),
    Page("/tenants", "Tenants", "tenants.html", view_tenants, menu="Tenants"),
    Page("/tenants/{name}", "Tenant", "tenant.html", view_tenant),
    Page("/keys", "Keys", "keys.html", view_keys, role="admin", menu="Keys"),
    Page("/batches", "Batches", "batches.html", view_batches, menu="Batches"),
    Page("/batches/{job}", "Batch", "batches_one.html", view_batch),
    Page("/signals", "Signals", "signals.html", view_signals, menu="Signals"),
    Page("/audit", "Audit", "audit.html", view_audit, menu="Audit"),
)
