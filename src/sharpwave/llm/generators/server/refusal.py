"""`Refusal`: a request that is answered with an error object."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse

from ....errors import ClosedError, NotReady, SharpwaveError

__all__ = ["Refusal", "refused"]


class Refusal(Exception):
    """Answered as `{"error": {"message", "type", "param", "code"}}`, as OpenAI and vLLM do."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    @classmethod
    def of(cls, error: SharpwaveError) -> Refusal:
        """What the generator raised: 503 where it is gone, else 400."""
        return cls(str(error), status=503 if isinstance(error, (NotReady, ClosedError)) else 400)

    def body(self) -> dict[str, object]:
        name = HTTPStatus(self.status).phrase.title().replace(" ", "").removesuffix("Error") + "Error"
        return {"error": {"message": str(self), "type": name, "param": self.param, "code": self.status}}


def refused(error: Refusal) -> JSONResponse:
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.body(), error.status, headers)
