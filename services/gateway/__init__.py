"""The gateway: the doors of the house for programs, HTTP and ZeroMQ. Text outside, token ids and bus messages inside.

It owns the chat template, the tokenizer, the incremental detokeniser, the table of requests, deadlines and cancelling.
It does not know tensors, layers, the worker or the cable; the host (services.mac) tells it what happened by messages.

    requests   what a client may ask (types), and what is refused by name
    reading    bytes of a body -> a request, or an error that names parameter, value and range
    template   messages -> text, by the model's own chat template
    prompt     text -> token ids -> the Generate message
    text       token bytes -> text that may be sent (UTF-8, stop strings)
    streams    the table of running requests: messages of the host in, pieces of answers out
    choices    one choice: tokens -> text, log-probabilities, the reason of its end
    gather     pieces -> chunks of a stream, or one body
    answers    pieces -> OpenAI-shaped bodies and chunks; errors -> OpenAI-shaped errors
    sse        bodies -> server-sent events
    trip       one request from body to end, for both doors: HTTP and ZeroMQ
    host       the bus: carries out what `streams` decided
    server     HTTP: carries out everything else (with replies, doors)

    outflow           one ZeroMQ request: what waits for its client's credit
    public_clients    one ZeroMQ client: what waits for it, and when it is cut
    public_reading    msgpack bodies -> the same requests
    public_events     what happens -> events for subscribers
    public_door       ZeroMQ: carries out what clients ask, and holds them to the rules
    public_endpoints  settings -> open sockets

trip, host, server, replies, doors and the public door with its events and endpoints act; the others are pure: no
socket, no clock, no task.
"""
