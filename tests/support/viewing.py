"""A viewer that answers, and requests to it."""

import http.client
import json
import threading
from contextlib import closing, contextmanager
from urllib.parse import urlencode

from salesrl_trl.record.view.record_index import Index
from salesrl_trl.record.view.viewer import Viewer


@contextmanager
def served(*runs):
    """A viewer that answers."""
    with closing(Index(list(runs))) as index:
        viewer = Viewer(index)
        thread = threading.Thread(target=viewer.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield viewer
        finally:
            viewer.shutdown()
            thread.join()
            viewer.server_close()


def asked(viewer, path, *, method="GET", host=None, **params):
    """Status, headers and body of a request below the viewer's key."""
    connection = http.client.HTTPConnection("127.0.0.1", viewer.server_port, timeout=20)
    query = f"?{urlencode(params)}" if params else ""
    connection.request(method, f"/{viewer.key}/{path}{query}", headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    is_json = answer.headers.get_content_type() == "application/json"
    return answer.status, answer.headers, json.loads(body) if is_json else body.decode()
