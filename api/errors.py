"""What a call to the proxy can end with. Apart from the client, so that catching them costs no HTTP library."""


class ProxyUnavailable(Exception):
    """The proxy is down, unreachable or overloaded: the call may succeed later."""


class ProxyRefused(Exception):
    """The proxy answered that this request is wrong; repeating it is of no use."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
