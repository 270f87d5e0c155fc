"""The web application: routes, layers around them, the page's files, and the connection that lives as long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware.cors import CORSMiddleware

import pagedserve
from pagedserve.api import chat, completions, errors, models
from pagedserve.api.access_log import AccessLog
from pagedserve.api.backend import Backend
from pagedserve.api.limits import ApiKeyLimit, BodyLimit
from pagedserve.api.metrics import Metrics
from pagedserve.api.start import Server
from pagedserve.config import Config

PAGE = Path(__file__).parent / "page"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(config: Config, endpoint: str) -> FastAPI:
    """The application of a server whose scheduler listens at `endpoint`; it need not be there yet."""
    server = Server(Backend(endpoint), Metrics(), config.http_request_timeout_s)

    @contextlib.asynccontextmanager
    async def connected(_: FastAPI) -> AsyncIterator[None]:
        server.backend.start()
        yield
        await server.backend.stop()

    app = FastAPI(title="PagedServe", version=pagedserve.__version__, docs_url=None, redoc_url=None, lifespan=connected)
    app.state.server = server
    app.state.created = int(time.time())
    app.include_router(completions.router)
    app.include_router(chat.router)
    app.include_router(models.router)
    errors.install(app)
    _add_page(app)
    if config.http_api_key:
        app.add_middleware(ApiKeyLimit, key=config.http_api_key)
    app.add_middleware(BodyLimit, max_bytes=config.http_max_body_bytes)
    origins = [origin.strip() for origin in config.http_cors_origins.split(",") if origin.strip()]
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(AccessLog)
    return app


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs_page() -> Response:
        return FileResponse(PAGE / "docs.html", headers=_PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=PAGE), name="page")
