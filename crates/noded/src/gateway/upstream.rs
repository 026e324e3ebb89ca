//! Connections to sandboxes. Each is driven by the request that uses it, on the same task: no hop between threads, and a
//! request that is dropped closes its connection, which is how sandboxd learns that the client left.

use std::{
    future::Future,
    io,
    path::Path,
    pin::Pin,
    sync::{
        atomic::{AtomicBool, Ordering},
        Arc,
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{header, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Empty;
use hyper::{
    body::Incoming,
    client::conn::{http1, TrySendError},
    rt::{Read, Write},
};
use hyper_util::rt::TokioIo;
use sandmill_wire::ApiError;
use tokio::{
    net::UnixStream,
    task::JoinHandle,
    time::{sleep, timeout, Instant},
};

use super::{headers, pool::InUse};
use crate::local_socket;

/// How long sandboxd may take to accept a connection: its accept loop answers in microseconds unless it is overrun.
const CONNECT: Duration = Duration::from_secs(5);
/// How long the tunnel to a port inside may take to open; sandboxd itself gives up after 10 s.
const TUNNEL: Duration = Duration::from_secs(12);

type Driver = Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>;

/// Opens a connection to sandboxd.
///
/// Errors: 502 `sandbox_unreachable`, 503 `sandbox_busy`.
pub async fn connect(socket: &Path) -> Result<UnixStream, ApiError> {
    let deadline = Instant::now() + CONNECT;
    loop {
        match local_socket::connect(socket).await {
            Ok(stream) => return Ok(stream),
            // The accept queue is full; a unix socket doesn't wait by itself.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                sleep(Duration::from_millis(5)).await;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(ApiError::new(503, "sandbox_busy", "the sandbox's daemon does not accept connections")
                    .hint("fewer calls at the same time, or more CPU for the sandbox")
                    .retryable());
            }
            Err(error) => {
                return Err(ApiError::new(502, "sandbox_unreachable", format!("the sandbox's daemon: {error}"))
                    .hint("it may just be ending; ask for the sandbox's state")
                    .retryable());
            }
        }
    }
}

/// One HTTP/1.1 connection into a sandbox.
pub struct Link {
    sender: http1::SendRequest<Upload>,
    driver: Driver,
    ended: bool,
}

impl Link {
    async fn over<T: Read + Write + Unpin + Send + 'static>(io: T) -> Result<Self, ApiError> {
        let handshake = http1::Builder::new().handshake(io).await;
        let (sender, connection) = handshake.map_err(|error| broken(&error))?;
        Ok(Self { sender, driver: Box::pin(connection.with_upgrades()), ended: false })
    }

    /// A new connection to sandboxd itself.
    pub async fn to_sandboxd(socket: &Path) -> Result<Self, ApiError> {
        Self::over(TokioIo::new(connect(socket).await?)).await
    }

    /// A new connection to what listens on `port` inside, through sandboxd's tunnel.
    ///
    /// Errors: also 502 `port_closed`, 504 `port_timeout`.
    pub async fn to_port(socket: &Path, port: u16) -> Result<Self, ApiError> {
        let opened = timeout(TUNNEL, tunnel(socket, port)).await;
        let stream = opened.map_err(|_| {
            ApiError::new(504, "port_timeout", format!("nothing accepted a connection on port {port} in time"))
                .hint("the server inside is overrun: its accept queue is full")
                .details(serde_json::json!({"port": port}))
                .retryable()
        })??;
        Self::over(stream).await
    }

    /// Whether a connection from the pool still stands and is free.
    pub fn is_free(&mut self, cx: &mut Context<'_>) -> bool {
        self.drive(cx);
        !self.ended && self.sender.is_ready()
    }

    fn drive(&mut self, cx: &mut Context<'_>) {
        if !self.ended && self.driver.as_mut().poll(cx).is_ready() {
            self.ended = true;
        }
    }

    /// Sends a request and waits for the answer's head. A request that wasn't sent at all comes back in the error.
    pub async fn exchange(
        &mut self,
        request: Request<Upload>,
    ) -> Result<Response<Incoming>, TrySendError<Request<Upload>>> {
        let Self { sender, driver, ended } = self;
        let mut answer = std::pin::pin!(sender.try_send_request(request));
        std::future::poll_fn(|cx| {
            if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
                return Poll::Ready(answer);
            }
            if !*ended && driver.as_mut().poll(cx).is_ready() {
                *ended = true;
            }
            answer.as_mut().poll(cx)
        })
        .await
    }

    /// Lets the connection run to its end on a task of its own, as an upgrade needs.
    pub fn run(self) -> Running {
        Running(tokio::spawn(async move {
            let Self { sender, driver, ended } = self;
            if !ended {
                // The error shows where the bytes end.
                let _ = driver.await;
            }
            drop(sender);
        }))
    }
}

/// A connection on its own task; ends when dropped.
pub struct Running(JoinHandle<()>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn tunnel(socket: &Path, port: u16) -> Result<hyper::upgrade::Upgraded, ApiError> {
    let stream = TokioIo::new(connect(socket).await?);
    let (mut sender, connection) = http1::handshake(stream).await.map_err(|error| broken(&error))?;
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.uri_mut() = format!("/sandmill/v1/tcp/{port}").parse().map_err(|error| broken(&error))?;
    request.headers_mut().insert(header::HOST, http::HeaderValue::from_static("sandboxd"));
    request.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    headers::set_upgrade(request.headers_mut(), http::HeaderValue::from_static("tcp"));
    // The sender ends with this block, and the connection with the sender.
    let answer = async move {
        let answer = sender.send_request(request).await.map_err(|error| broken(&error))?;
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(ApiError::new(502, "port_closed", "The sandbox is running but port is not open")
                .hint(format!("start a server on port {port} inside; it must listen on 127.0.0.1 or on all addresses"))
                .details(serde_json::json!({"port": port}))
                .retryable());
        }
        hyper::upgrade::on(answer).await.map_err(|error| broken(&error))
    };
    let (answer, _driven) = tokio::join!(answer, connection.with_upgrades());
    answer
}

pub fn broken(error: &dyn std::error::Error) -> ApiError {
    ApiError::new(502, "sandbox_broke_off", format!("the sandbox ended the connection before it answered: {error}"))
        .hint("if the sandbox still runs, what the call did inside is unknown; look before trying again")
}

/// A client's request body on its way in; knows when it is through.
pub struct Upload {
    body: Incoming,
    done: Arc<AtomicBool>,
}

impl Upload {
    pub fn new(body: Incoming) -> (Self, Arc<AtomicBool>) {
        let done = Arc::new(AtomicBool::new(body.is_end_stream()));
        (Self { body, done: Arc::clone(&done) }, done)
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(frame, Poll::Ready(None)) || (frame.is_ready() && self.body.is_end_stream()) {
            self.done.store(true, Ordering::Relaxed);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer's body on its way out, together with the connection that it comes from.
pub struct Passing {
    body: Incoming,
    source: Source,
    in_use: InUse,
    /// The connection may be used again.
    keep: bool,
}

enum Source {
    /// Driven here, whenever the client can take more: backpressure reaches the sandbox by itself.
    Inline(Link),
    /// The upload still runs beside the answer, and must not wait for the client to read.
    Aside(#[allow(dead_code, reason = "held for its drop")] Running),
    Ended,
}

impl Passing {
    pub fn new(body: Incoming, link: Link, in_use: InUse, uploaded: &AtomicBool, keep: bool) -> Self {
        let through = uploaded.load(Ordering::Relaxed);
        let source = if through { Source::Inline(link) } else { Source::Aside(link.run()) };
        let mut passing = Self { body, source, in_use, keep };
        if passing.body.is_end_stream() {
            let mut cx = Context::from_waker(std::task::Waker::noop());
            passing.finish(&mut cx);
        }
        passing
    }

    pub fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let mut frame = Pin::new(&mut self.body).poll_frame(cx);
        if frame.is_pending() {
            if let Source::Inline(link) = &mut self.source {
                link.drive(cx);
                frame = Pin::new(&mut self.body).poll_frame(cx);
            }
        }
        match &frame {
            Poll::Ready(Some(Err(_))) => self.source = Source::Ended,
            Poll::Ready(None) => self.finish(cx),
            Poll::Ready(Some(Ok(_))) if self.body.is_end_stream() => self.finish(cx),
            _ => {}
        }
        frame
    }

    fn finish(&mut self, cx: &mut Context<'_>) {
        if let Source::Inline(mut link) = std::mem::replace(&mut self.source, Source::Ended) {
            if self.keep && link.is_free(cx) {
                self.in_use.give_back(link);
            }
        }
    }

    pub fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    pub fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
