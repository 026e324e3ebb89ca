//! A client's connection: closes itself when a request's head comes too slowly, or when nothing happens for long.

use std::{
    future::Future as _,
    io,
    pin::Pin,
    sync::{
        atomic::{AtomicU64, AtomicUsize, Ordering},
        Arc,
    },
    task::{ready, Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{sleep, Instant, Sleep},
};

/// How long a client may take from the first byte of a request's head to its last.
pub const HEAD: Duration = Duration::from_secs(15);
/// How long a connection may be without a request. Longer than the clients' own pools keep one, so that it is they who
/// end it and no request is lost to a close that crosses it.
pub const IDLE: Duration = Duration::from_secs(620);

/// Requests of one connection, as its service counts them.
#[derive(Default)]
pub struct Requests {
    begun: AtomicU64,
    open: AtomicUsize,
}

impl Requests {
    /// Counts a request until the returned value is dropped.
    pub fn begin(self: &Arc<Self>) -> Open {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
        Open(Arc::clone(self))
    }
}

pub struct Open(Arc<Requests>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

pub struct Client {
    stream: TcpStream,
    requests: Arc<Requests>,
    /// HTTP/2 exchanges frames without a request: only idleness counts there.
    http2: Option<bool>,
    waiting: Option<(Waiting, Pin<Box<Sleep>>)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Waiting {
    /// For the rest of a head, whose first bytes came when that many requests had begun.
    Head(u64),
    /// For a request, since that many had begun.
    Request(u64),
}

impl Client {
    pub fn new(stream: TcpStream, requests: Arc<Requests>) -> Self {
        Self { stream, requests, http2: None, waiting: None }
    }

    pub fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// What the connection waits for now that nothing can be read, given what it waited for before.
    fn now_waiting(&self) -> Option<Waiting> {
        if self.requests.open.load(Ordering::Relaxed) > 0 {
            return None;
        }
        let begun = self.requests.begun.load(Ordering::Relaxed);
        match self.waiting {
            Some((Waiting::Head(since), _)) if since == begun => Some(Waiting::Head(begun)),
            _ => Some(Waiting::Request(begun)),
        }
    }

    fn wait_for(&mut self, waiting: Waiting) {
        let period = match waiting {
            Waiting::Head(_) => HEAD,
            Waiting::Request(_) => IDLE,
        };
        match &mut self.waiting {
            Some((old, _)) if *old == waiting => {}
            Some((old, sleep)) => {
                *old = waiting;
                sleep.as_mut().reset(Instant::now() + period);
            }
            None => self.waiting = Some((waiting, Box::pin(sleep(period)))),
        }
    }
}

impl AsyncRead for Client {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        if let Poll::Ready(read) = Pin::new(&mut this.stream).poll_read(cx, buf) {
            let bytes = &buf.filled()[before..];
            let http2 = *this.http2.get_or_insert_with(|| bytes.starts_with(b"PRI"));
            if !bytes.is_empty() && !http2 && this.requests.open.load(Ordering::Relaxed) == 0 {
                this.wait_for(Waiting::Head(this.requests.begun.load(Ordering::Relaxed)));
            }
            return Poll::Ready(read);
        }
        let Some(waiting) = this.now_waiting() else {
            this.waiting = None;
            return Poll::Pending;
        };
        this.wait_for(waiting);
        if let Some((_, sleep)) = &mut this.waiting {
            ready!(sleep.as_mut().poll(cx));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Poll::Pending
    }
}

impl AsyncWrite for Client {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}
