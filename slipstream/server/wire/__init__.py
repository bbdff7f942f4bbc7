"""The bodies of requests, as pydantic checks them and as `/openapi.json` shows them."""
