//! Accept loops.

use std::{cell::Cell, io, rc::Rc, time::Duration};

use tokio::net::{TcpListener, UnixListener};

use super::{connection, handover, Origin};
use crate::app::App;

/// Connections served at once; more wait in the kernel's backlog.
const CONNECTION_LIMIT: usize = 4096;
/// How long accepting rests when the process is out of descriptors or connections.
const REST: Duration = Duration::from_millis(20);

/// Counts the connections of one listener.
#[derive(Clone, Default)]
struct Gate(Rc<Cell<usize>>);

struct Admitted(Rc<Cell<usize>>);

impl Gate {
    async fn admit(&self) -> Admitted {
        while self.0.get() >= CONNECTION_LIMIT {
            tokio::time::sleep(REST).await;
        }
        self.0.set(self.0.get() + 1);
        Admitted(Rc::clone(&self.0))
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Serves noded's socket for ever.
pub async fn unix(app: Rc<App>, listener: UnixListener) -> io::Error {
    let gate = Gate::default();
    loop {
        let admitted = gate.admit().await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let app = Rc::clone(&app);
                tokio::task::spawn_local(async move {
                    handover::serve(app, stream).await;
                    drop(admitted);
                });
            }
            Err(error) if passes(&error) => tokio::time::sleep(REST).await,
            Err(error) => return error,
        }
    }
}

/// Serves a TCP listener of our own for ever.
pub async fn tcp(app: Rc<App>, listener: TcpListener) -> io::Error {
    let gate = Gate::default();
    loop {
        let admitted = gate.admit().await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let _ = stream.set_nodelay(true);
                let app = Rc::clone(&app);
                tokio::task::spawn_local(async move {
                    connection::serve(app, stream, Origin::Network).await;
                    drop(admitted);
                });
            }
            Err(error) if passes(&error) => tokio::time::sleep(REST).await,
            Err(error) => return error,
        }
    }
}

/// Whether accepting can work again: the client left, or descriptors or memory are short.
fn passes(error: &io::Error) -> bool {
    !matches!(error.raw_os_error(), Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP))
}
