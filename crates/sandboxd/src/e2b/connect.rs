//! The Connect protocol: unary calls and streams, JSON and protobuf.
//!
//! A unary message is a body; a stream is a row of envelopes (a byte of flags, a length, a message) and ends with one that
//! carries the error, if any. Messages are not compressed; a client that compresses its own is told so.

use std::{io, time::Duration};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{header, HeaderMap, HeaderName, HeaderValue, StatusCode};
use prost::Message;
use serde::{de::DeserializeOwned, Serialize};
use tokio::sync::mpsc;

use super::failure::{Code, Failure};
use crate::{
    files::receive::Chunks,
    server::{collect, Reply, ReplyBody, Request},
};

/// Longest message, in either direction of the protocol.
const MESSAGE_LIMIT_BYTES: usize = 64 << 20;
/// Messages that wait for a slow client.
const AHEAD: usize = 4;
/// A client that takes nothing for this long is gone: its process must not wait for it any longer.
const STALLED: Duration = Duration::from_secs(600);
const FLAG_COMPRESSED: u8 = 1;
const FLAG_END: u8 = 2;
const TIMEOUT: HeaderName = HeaderName::from_static("connect-timeout-ms");
const STREAM_ENCODING: HeaderName = HeaderName::from_static("connect-content-encoding");
const KEEPALIVE: HeaderName = HeaderName::from_static("keepalive-ping-interval");
const DEFAULT_KEEPALIVE: Duration = Duration::from_secs(90);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    Json,
    Protobuf,
}

impl Codec {
    pub fn decode<T: Message + Default + DeserializeOwned>(self, bytes: &[u8]) -> Result<T, Failure> {
        let decoded = match self {
            // An empty body is an empty message, as it is in protobuf.
            Self::Json if bytes.is_empty() => return Ok(T::default()),
            Self::Json => serde_json::from_slice(bytes).map_err(|error| error.to_string()),
            Self::Protobuf => T::decode(bytes).map_err(|error| error.to_string()),
        };
        decoded.map_err(|error| Failure::invalid(format!("the message can't be read: {error}")))
    }

    /// Appends `message` to `buffer`.
    fn encode(self, message: &(impl Message + Serialize), buffer: &mut BytesMut) -> Result<(), Failure> {
        let encoded = match self {
            Self::Json => serde_json::to_writer(buffer.writer(), message).map_err(|error| error.to_string()),
            Self::Protobuf => message.encode(buffer).map_err(|error| error.to_string()),
        };
        encoded.map_err(|error| Failure::new(Code::Internal, format!("the answer can't be written: {error}")))
    }

    fn unary_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Json => "application/json",
            Self::Protobuf => "application/proto",
        })
    }

    fn stream_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Json => "application/connect+json",
            Self::Protobuf => "application/connect+proto",
        })
    }
}

/// What a call's headers say.
pub struct Call {
    pub codec: Codec,
    pub streaming: bool,
    pub headers: HeaderMap,
    /// When the client stops waiting. Zero and absent: never.
    pub timeout: Option<Duration>,
}

impl Call {
    /// Errors: `invalid_argument`; `unimplemented` for compression; HTTP 415 for another content type.
    pub fn of(headers: &HeaderMap) -> Result<Self, Failure> {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
        let kind = kind.split(';').next().unwrap_or("").trim();
        let (codec, streaming) = match kind.to_ascii_lowercase().as_str() {
            "application/json" => (Codec::Json, false),
            "application/proto" => (Codec::Protobuf, false),
            "application/connect+json" => (Codec::Json, true),
            "application/connect+proto" => (Codec::Protobuf, true),
            other => {
                return Err(Failure::invalid(format!("the content type {other:?} is none of Connect's"))
                    .with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE))
            }
        };
        let encoding = if streaming { STREAM_ENCODING } else { header::CONTENT_ENCODING };
        if let Some(encoding) = headers.get(encoding).filter(|encoding| *encoding != "identity") {
            let message = format!("unknown compression {encoding:?}: supported encodings are identity");
            return Err(Failure::new(Code::Unimplemented, message));
        }
        let timeout = match headers.get(TIMEOUT).map(|value| value.to_str().unwrap_or("?")) {
            None => None,
            Some(digits) if digits.len() <= 10 && digits.bytes().all(|digit| digit.is_ascii_digit()) => {
                digits.parse().ok().filter(|milliseconds| *milliseconds > 0).map(Duration::from_millis)
            }
            Some(other) => return Err(Failure::invalid(format!("the timeout {other:?} is not a number of ms"))),
        };
        Ok(Self { codec, streaming, headers: headers.clone(), timeout })
    }

    /// How often the client wants to hear something on a stream.
    pub fn keepalive(&self) -> Duration {
        let seconds = self.headers.get(KEEPALIVE).and_then(|value| value.to_str().ok()?.parse().ok());
        seconds.filter(|seconds| *seconds > 0).map_or(DEFAULT_KEEPALIVE, Duration::from_secs)
    }
}

/// Answers a unary call.
pub async fn unary<Q, A>(request: Request, handler: impl AsyncFnOnce(&Call, Q) -> Result<A, Failure>) -> Reply
where
    Q: Message + Default + DeserializeOwned,
    A: Message + Serialize,
{
    let call = match Call::of(request.headers()) {
        Ok(call) => call,
        Err(failure) => return unary_failure(&failure),
    };
    if call.streaming {
        let failure = Failure::invalid("this call is not a stream").with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE);
        return unary_failure(&failure);
    }
    let answered = within(call.timeout, async {
        let body = collect(request.into_body(), MESSAGE_LIMIT_BYTES).await?;
        let message = call.codec.decode(&body)?;
        handler(&call, message).await
    });
    let mut buffer = BytesMut::new();
    match answered.await.and_then(|answer| call.codec.encode(&answer, &mut buffer)) {
        Ok(()) => {
            let mut reply = Reply::new(ReplyBody::full(buffer.freeze()));
            reply.headers_mut().insert(header::CONTENT_TYPE, call.codec.unary_type());
            reply
        }
        Err(failure) => unary_failure(&failure),
    }
}

async fn within<T>(
    timeout: Option<Duration>,
    work: impl std::future::Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    match timeout {
        None => work.await,
        Some(timeout) => tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| Err(late())),
    }
}

pub fn late() -> Failure {
    Failure::new(Code::DeadlineExceeded, "the call's time is over")
}

/// The answer to a unary call that failed, always JSON.
pub fn unary_failure(failure: &Failure) -> Reply {
    let json = serde_json::to_vec(failure).unwrap_or_default();
    let mut reply = Reply::new(ReplyBody::full(json));
    *reply.status_mut() = failure.status;
    let headers = reply.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if failure.code == Code::Unimplemented {
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
    reply
}

/// Answers a call whose answer is a stream: `handler` feeds it from a task of its own, until the client leaves.
pub async fn server_stream<Q>(
    request: Request,
    handler: impl AsyncFnOnce(Call, Q, &Stream) -> Result<(), Failure> + 'static,
) -> Reply
where
    Q: Message + Default + DeserializeOwned + 'static,
{
    let call = match streaming(request.headers()) {
        Ok(call) => call,
        Err(failure) => return stream_failure(request.headers(), failure),
    };
    // Read to its end before the answer begins: a body that the answer overtakes costs the connection.
    let mut envelopes = Envelopes::new(request, call.codec);
    let message = envelopes
        .next()
        .await
        .and_then(|message| message.ok_or_else(|| Failure::invalid("the stream holds no message")));
    envelopes.chunks.drain().await;
    let (stream, reply) = Stream::open(call.codec);
    tokio::task::spawn_local(async move {
        let served = match message {
            Ok(message) => handler(call, message, &stream).await,
            Err(failure) => Err(failure),
        };
        stream.end(served.err()).await;
    });
    reply
}

/// Answers a call whose request is a stream.
pub async fn client_stream<A: Message + Serialize>(
    request: Request,
    handler: impl AsyncFnOnce(Call, &mut Envelopes) -> Result<A, Failure>,
) -> Reply {
    let call = match streaming(request.headers()) {
        Ok(call) => call,
        Err(failure) => return stream_failure(request.headers(), failure),
    };
    let codec = call.codec;
    let timeout = call.timeout;
    let mut envelopes = Envelopes::new(request, codec);
    let answered = within(timeout, handler(call, &mut envelopes)).await;
    let mut buffer = BytesMut::new();
    let failure = match answered {
        Ok(answer) => envelope(codec, &answer, &mut buffer).err(),
        Err(failure) => Some(failure),
    };
    end_envelope(failure, &mut buffer);
    let mut reply = Reply::new(ReplyBody::full(buffer.freeze()));
    reply.headers_mut().insert(header::CONTENT_TYPE, codec.stream_type());
    reply
}

/// The call that a stream's headers say. Errors: as [`Call::of`]; HTTP 415 for a unary content type.
fn streaming(headers: &HeaderMap) -> Result<Call, Failure> {
    let call = Call::of(headers)?;
    if call.streaming {
        return Ok(call);
    }
    Err(Failure::invalid("this call is a stream: send application/connect+json or +proto")
        .with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE))
}

/// The answer to a stream whose headers are refused: an empty stream that ends so, where the client can read one.
fn stream_failure(headers: &HeaderMap, failure: Failure) -> Reply {
    if failure.status == StatusCode::UNSUPPORTED_MEDIA_TYPE {
        return unary_failure(&failure);
    }
    let kind = headers.get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let codec = if kind.starts_with(b"application/connect+proto") { Codec::Protobuf } else { Codec::Json };
    let mut buffer = BytesMut::new();
    end_envelope(Some(failure), &mut buffer);
    let mut reply = Reply::new(ReplyBody::full(buffer.freeze()));
    reply.headers_mut().insert(header::CONTENT_TYPE, codec.stream_type());
    reply
}

/// The sending side of a stream.
pub struct Stream {
    codec: Codec,
    sender: mpsc::Sender<io::Result<Bytes>>,
}

impl Stream {
    fn open(codec: Codec) -> (Self, Reply) {
        let (sender, body) = ReplyBody::channel(AHEAD);
        let mut reply = Reply::new(body);
        let headers = reply.headers_mut();
        headers.insert(header::CONTENT_TYPE, codec.stream_type());
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        (Self { codec, sender }, reply)
    }

    /// Sends a message, waiting while the client is slow; false when it is gone, or took nothing for ten minutes.
    pub async fn send(&self, message: &(impl Message + Serialize)) -> Result<bool, Failure> {
        let mut buffer = BytesMut::new();
        envelope(self.codec, message, &mut buffer)?;
        let sent = tokio::time::timeout(STALLED, self.sender.send(Ok(buffer.freeze()))).await;
        Ok(matches!(sent, Ok(Ok(()))))
    }

    /// Waits until the client is gone.
    pub async fn closed(&self) {
        self.sender.closed().await;
    }

    async fn end(self, failure: Option<Failure>) {
        let mut buffer = BytesMut::new();
        end_envelope(failure, &mut buffer);
        let _ = tokio::time::timeout(STALLED, self.sender.send(Ok(buffer.freeze()))).await;
    }
}

fn envelope(codec: Codec, message: &(impl Message + Serialize), buffer: &mut BytesMut) -> Result<(), Failure> {
    let start = buffer.len();
    buffer.put_u8(0);
    buffer.put_u32(0);
    codec.encode(message, buffer)?;
    let length = (buffer.len() - start - 5) as u32;
    buffer[start + 1..start + 5].copy_from_slice(&length.to_be_bytes());
    Ok(())
}

fn end_envelope(failure: Option<Failure>, buffer: &mut BytesMut) {
    #[derive(Serialize)]
    struct End {
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<Failure>,
    }
    let json = serde_json::to_vec(&End { error: failure }).unwrap_or_default();
    buffer.put_u8(FLAG_END);
    buffer.put_u32(json.len() as u32);
    buffer.put_slice(&json);
}

/// The receiving side of a stream.
pub struct Envelopes {
    chunks: Chunks,
    codec: Codec,
    buffer: BytesMut,
}

impl Envelopes {
    fn new(request: Request, codec: Codec) -> Self {
        Self { chunks: Chunks::patient(request.into_body()), codec, buffer: BytesMut::new() }
    }

    /// The next message; None at the end.
    pub async fn next<T: Message + Default + DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        loop {
            if let Some(message) = take_envelope(&mut self.buffer)? {
                return self.codec.decode(&message).map(Some);
            }
            match self.chunks.next().await? {
                Some(chunk) => self.buffer.extend_from_slice(&chunk),
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(Failure::invalid("the stream ends inside a message")),
            }
        }
    }
}

fn take_envelope(buffer: &mut BytesMut) -> Result<Option<Bytes>, Failure> {
    if buffer.len() < 5 {
        return Ok(None);
    }
    let flags = buffer[0];
    let length = u32::from_be_bytes([buffer[1], buffer[2], buffer[3], buffer[4]]) as usize;
    if flags & FLAG_COMPRESSED != 0 {
        return Err(Failure::invalid("a message is compressed, but no compression was agreed on"));
    }
    if length > MESSAGE_LIMIT_BYTES {
        let message = format!("a message of {length} bytes is longer than {MESSAGE_LIMIT_BYTES}");
        return Err(Failure::new(Code::ResourceExhausted, message));
    }
    if buffer.len() - 5 < length {
        return Ok(None);
    }
    buffer.advance(5);
    Ok(Some(buffer.split_to(length).freeze()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn headers_say_what_a_call_is() {
        let call = Call::of(&headers(&[
            ("content-type", "application/connect+proto"),
            ("connect-timeout-ms", "1500"),
            ("keepalive-ping-interval", "5"),
        ]));
        let call = call.unwrap_or_else(|failure| panic!("{failure:?}"));
        assert_eq!((call.codec, call.streaming), (Codec::Protobuf, true));
        assert_eq!((call.timeout, call.keepalive()), (Some(Duration::from_millis(1500)), Duration::from_secs(5)));
        let call =
            Call::of(&headers(&[("content-type", "application/json; charset=utf-8"), ("connect-timeout-ms", "0")]));
        assert_eq!(call.unwrap_or_else(|failure| panic!("{failure:?}")).timeout, None);
    }

    #[test]
    fn what_is_not_spoken_is_said() {
        let code = |pairs| Call::of(&headers(pairs)).err().map(|failure| (failure.code, failure.status.as_u16()));
        assert_eq!(code(&[("content-type", "text/plain")]), Some((Code::InvalidArgument, 415)));
        assert_eq!(
            code(&[("content-type", "application/json"), ("content-encoding", "gzip")]),
            Some((Code::Unimplemented, 501))
        );
        assert_eq!(
            code(&[("content-type", "application/json"), ("connect-timeout-ms", "-1")]),
            Some((Code::InvalidArgument, 400))
        );
    }

    #[test]
    fn envelopes_come_in_any_pieces() {
        let mut buffer = BytesMut::from(&[0, 0, 0, 0, 3, b'a', b'b'][..]);
        assert_eq!(take_envelope(&mut buffer).unwrap(), None);
        buffer.extend_from_slice(b"c\0\0\0\0\0\x01");
        assert_eq!(take_envelope(&mut buffer).unwrap().as_deref(), Some(&b"abc"[..]));
        assert_eq!(take_envelope(&mut buffer).unwrap().as_deref(), Some(&b""[..]));
        assert!(take_envelope(&mut buffer).unwrap().is_none());
        assert!(take_envelope(&mut BytesMut::from(&[1, 0, 0, 0, 0][..])).is_err());
        assert!(take_envelope(&mut BytesMut::from(&[0, 255, 0, 0, 0][..])).is_err());
    }
}
