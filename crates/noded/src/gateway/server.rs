//! The accept loop.

use std::{convert::Infallible, future::Future, sync::Arc, time::Duration};

use hyper::{body::Incoming, service::service_fn, Request};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use rustix::{net::sockopt, process::Resource};
use sandmill_wire::ApiError;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::{watch, Semaphore},
    time::{sleep, timeout},
};

use super::{
    client::{Client, Requests},
    pool::Pool,
    proxy::{self, Gateway},
    reply, Directory,
};

/// Most connections at once; fewer where the process may not open that many descriptors.
const CONNECTIONS: usize = 32_768;
/// Refusals being written at once; beyond them a connection is closed without a word.
const REFUSALS: usize = 64;
/// Largest head of a request.
const HEAD_BYTES: usize = 64 * 1024;
/// How long accepting rests when the process is out of descriptors.
const REST: Duration = Duration::from_millis(20);
/// How long open requests may still take once the gateway ends.
const LAST_REQUESTS: Duration = Duration::from_secs(5);
/// After how long without a byte the kernel asks whether a client's machine is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Serves until `shutdown` ends; then answers what is open, for five seconds at most.
///
/// `domain`: what host names `{port}-{id}.{domain}` must end in; empty: any.
pub async fn serve(
    listener: TcpListener,
    domain: String,
    directory: Arc<dyn Directory>,
    shutdown: impl Future<Output = ()>,
) {
    let limit = connection_limit();
    let gateway = Arc::new(Gateway { domain, pool: Pool::new(directory) });
    let house = tokio::spawn(gateway.pool.clone().keep_house());
    let connections = Arc::new(Semaphore::new(limit));
    let refusals = Arc::new(Semaphore::new(REFUSALS));
    let (phase, _) = watch::channel(Phase::Open);
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // A client that left while it waited, or no descriptor free: either passes.
                if error.raw_os_error() == Some(libc::EMFILE) || error.raw_os_error() == Some(libc::ENFILE) {
                    sleep(REST).await;
                }
                continue;
            }
        };
        tune(&stream);
        match Arc::clone(&connections).try_acquire_owned() {
            Ok(permit) => {
                let connection = connection(Arc::clone(&gateway), stream, phase.subscribe());
                tokio::spawn(async move {
                    connection.await;
                    drop(permit);
                });
            }
            Err(_) => {
                if let Ok(permit) = Arc::clone(&refusals).try_acquire_owned() {
                    tokio::spawn(async move {
                        let _ = timeout(Duration::from_secs(1), refuse(stream, limit)).await;
                        drop(permit);
                    });
                }
            }
        }
    }
    drop(listener);
    phase.send_replace(Phase::Draining);
    let _ = timeout(LAST_REQUESTS, phase.closed()).await;
    phase.send_replace(Phase::Closed);
    house.abort();
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// Open requests are answered, no new ones taken.
    Draining,
    Closed,
}

async fn connection(gateway: Arc<Gateway>, stream: TcpStream, mut phase: watch::Receiver<Phase>) {
    let requests = Arc::new(Requests::default());
    let client = TokioIo::new(Client::new(stream, Arc::clone(&requests)));
    let service = service_fn(move |request: Request<Incoming>| {
        let gateway = Arc::clone(&gateway);
        let open = requests.begin();
        async move {
            let reply = proxy::answer(gateway, request).await;
            Ok::<_, Infallible>(reply.map(|body| reply::Counted::new(body, open)))
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().max_buf_size(HEAD_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(HEAD_BYTES as u32)
        .max_concurrent_streams(256)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20);
    let connection = builder.serve_connection_with_upgrades(client, service);
    let mut connection = std::pin::pin!(connection);
    let mut draining = false;
    loop {
        tokio::select! {
            // An error here is the client's connection breaking: there is nobody left to tell.
            _ = connection.as_mut() => return,
            changed = phase.changed() => {
                if changed.is_err() || *phase.borrow() == Phase::Closed {
                    return;
                }
                if !draining {
                    draining = true;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }
}

fn tune(stream: &TcpStream) {
    // What fails here costs speed only.
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, KEEPALIVE);
    let _ = sockopt::set_tcp_keepintvl(stream, KEEPALIVE / 4);
}

/// Half of what the process may open stays for connections into sandboxes, and for everything else.
fn connection_limit() -> usize {
    let open_files = rustix::process::getrlimit(Resource::Nofile).current;
    open_files.map_or(CONNECTIONS, |most| usize::try_from(most / 2).unwrap_or(CONNECTIONS)).clamp(16, CONNECTIONS)
}

/// Says why, and waits until the client has read it: a close with unread bytes would take the answer away.
async fn refuse(mut stream: TcpStream, limit: usize) -> std::io::Result<()> {
    let error = ApiError::new(503, "too_many_connections", format!("{limit} connections are open"))
        .hint("use one client with a pool, or raise noded's limit of open files (LimitNOFILE)")
        .retryable();
    stream.write_all(&reply::raw_error(&error, None)).await?;
    stream.shutdown().await?;
    tokio::io::copy(&mut stream, &mut tokio::io::sink()).await?;
    Ok(())
}
