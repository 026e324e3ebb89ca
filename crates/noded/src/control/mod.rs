//! The control API over `DIR/noded.sock`; see `docs/reference/protocols.md`, section 2.
//!
//! - [`serve`]: connections and their end.
//! - `routes`: which call is whose. Each area answers its own; nothing is decided here.
//! - `reply`: answers and errors as JSON.

mod reply;
mod routes;

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use hyper_util::{rt::TokioIo, rt::TokioTimer, server::graceful::GracefulShutdown};
use tokio::{net::UnixListener, sync::watch};

use crate::{doctor::Doctor, images::Store, sandbox::Node};

/// How long a client may take to send a request's head.
const HEAD: Duration = Duration::from_secs(10);
/// How long calls that run may still take once noded ends.
const LAST_CALLS: Duration = Duration::from_secs(5);

/// Everything that the calls need.
pub struct Api {
    pub node: Node,
    pub store: Store,
    pub doctor: Doctor,
    pub data_addr: SocketAddr,
    /// Set by `POST /v1/shutdown`.
    pub stop: watch::Sender<Option<Stop>>,
}

/// How noded was asked to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stop {
    pub keep_sandboxes: bool,
}

/// Serves until `stop` is set; then lets running calls finish, for five seconds at most.
pub async fn serve(listener: UnixListener, api: Arc<Api>) {
    let graceful = GracefulShutdown::new();
    let mut stopped = api.stop.subscribe();
    let mut http = hyper::server::conn::http1::Builder::new();
    // A client that goes away is noticed while its call runs: what only it waits for (a pull, a poll) ends.
    http.timer(TokioTimer::new()).header_read_timeout(HEAD);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.wait_for(Option::is_some) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors: those of calls that end come back.
                eprintln!("noded: control: {error}");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        let api = Arc::clone(&api);
        let service = hyper::service::service_fn(move |request| {
            let api = Arc::clone(&api);
            async move { Ok::<_, Infallible>(routes::answer(api, request).await) }
        });
        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            // A client that goes away in the middle is its own business.
            let _ = connection.await;
        });
    }
    let _ = tokio::time::timeout(LAST_CALLS, graceful.shutdown()).await;
}
