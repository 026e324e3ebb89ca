//! noded, the host's agent.
//!
//! # Layout
//! - `arguments`, `state_dir`: the command line; the directory that everything lies in, and its lock.
//! - `local_socket`: unix sockets with long paths; descriptors that go with a message.
//! - `control`: the control API over `DIR/noded.sock` (routes only; each area answers its own).
//! - `sandbox`: life of a sandbox: registry, create, delete, re-adoption, leases, ends.
//! - `isolation`: namespaces, mounts, cgroups, seccomp: the only unsafe code that touches the kernel's isolation.
//! - `images`: the content-addressed layer store, imports, the `host` image, commits.
//! - `network`: veth, NAT, DNS for sandboxes with network `all`.
//! - `gateway`: the data path: routing by header or host name, tokens, handing over connections.
//! - `doctor`: what this machine gives and lacks.

mod arguments;
mod control;
mod doctor;
mod gateway;
mod images;
mod isolation;
mod local_socket;
mod network;
mod sandbox;
mod state_dir;

use std::{net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use tokio::{
    net::{TcpListener, UnixListener},
    signal::unix::{signal, SignalKind},
    sync::watch,
};

use crate::{
    arguments::Arguments,
    control::{Api, Stop},
    doctor::Doctor,
    images::Store,
    isolation::process,
    sandbox::{Node, Options},
    state_dir::StateDir,
};

/// Threads for blocking work: creates, ends, imports. More of either wait in line.
const BLOCKING_THREADS: usize = 64;

/// How often the image store looks at how full its disk is.
const IMAGE_CHECK: Duration = Duration::from_secs(60);
/// How long an earlier noded may take to let go of the state directory.
const PREDECESSOR: Duration = Duration::from_secs(2);
/// How long work in progress may take at the end.
const LAST_WORK: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("noded: {message}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<(), String> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    if !process::is_root() {
        return Err("it must run as root: only root may make namespaces, mounts and cgroups for others".to_owned());
    }
    if arguments.parent_death {
        process::die_with_parent();
    }
    let state_dir = StateDir::claim(&arguments.state_dir, PREDECESSOR)?;
    // Before there is a second thread: a namespace belongs to a thread and is inherited by those it starts.
    process::own_mount_namespace().map_err(|error| format!("a mount namespace of its own: {error}"))?;
    process::raise_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(std::thread::available_parallelism().map_or(2, std::num::NonZero::get).clamp(2, 8))
        .max_blocking_threads(BLOCKING_THREADS + arguments.max_starting)
        .build()
        .map_err(|error| format!("the event loop: {error}"))?;
    let stop = runtime.block_on(serve(&arguments, &state_dir))?;
    // What still runs may write to the directory; a thread that the kernel holds is not waited for any longer.
    runtime.shutdown_timeout(LAST_WORK);
    state_dir.unmount_all();
    if arguments.ephemeral && !stop.keep_sandboxes {
        state_dir.erase();
    }
    Ok(())
}

/// Removes at the start what no image needs, and from time to time what fills the disk.
async fn tidy(store: Store) {
    let of_sweep = store.clone();
    let mut work = tokio::task::spawn_blocking(move || of_sweep.sweep());
    loop {
        if let Ok(Err(error)) = work.await {
            eprintln!("noded: the image store was not tidied: {error}");
        }
        tokio::time::sleep(IMAGE_CHECK).await;
        let store = store.clone();
        work = tokio::task::spawn_blocking(move || store.collect(&images::Collection::default()).map(drop));
    }
}

/// Runs until it is told to stop, by a signal or a call; then ends what has to end.
async fn serve(arguments: &Arguments, state_dir: &StateDir) -> Result<Stop, String> {
    let dir = state_dir.path().to_owned();
    let data = TcpListener::bind(arguments.data_listen)
        .await
        .map_err(|error| format!("cannot listen on {}: {error}", arguments.data_listen))?;
    let data_addr: SocketAddr = data.local_addr().map_err(|error| format!("the data address: {error}"))?;
    let listener = state_dir.listen()?;
    listener.set_nonblocking(true).map_err(|error| format!("noded.sock: {error}"))?;
    let listener = UnixListener::from_std(listener).map_err(|error| format!("noded.sock: {error}"))?;

    let options = images::Options { registries: arguments.registries.clone(), marks: arguments.marks };
    let store = Store::open(&dir.join("images"), options).map_err(|error| error.to_string())?;
    let options = Options {
        dir: dir.clone(),
        sandboxd: arguments.sandboxd.clone(),
        max_starting: arguments.max_starting,
        max_warm: arguments.max_warm,
    };
    let of_node = store.clone();
    let (node, survivors) = tokio::task::spawn_blocking(move || Node::open(options, of_node))
        .await
        .map_err(|_| "the take-over of an earlier noded's sandboxes failed".to_owned())??;
    node.start(survivors);
    tokio::spawn(tidy(store.clone()));

    let (stop, mut stopped) = watch::channel(None);
    let api = Api { node: node.clone(), store, doctor: Doctor::new(&dir), data_addr, stop: stop.clone() };
    let control = tokio::spawn(control::serve(listener, Arc::new(api)));
    let domain = arguments.domain.clone().unwrap_or_default();
    let mut ended = stop.subscribe();
    let gateway = tokio::spawn(gateway::serve(data, domain, Arc::new(node.clone()), async move {
        let _ = ended.wait_for(Option::is_some).await;
    }));
    state_dir.announce(data_addr)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(|error| format!("signals: {error}"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| format!("signals: {error}"))?;
    let how = tokio::select! {
        _ = terminate.recv() => Stop { keep_sandboxes: false },
        _ = interrupt.recv() => Stop { keep_sandboxes: false },
        asked = stopped.wait_for(Option::is_some) => asked.ok().and_then(|asked| *asked).unwrap_or(Stop { keep_sandboxes: true }),
    };
    state_dir.withdraw();
    stop.send_replace(Some(how));
    node.close(how.keep_sandboxes).await;
    // Both stop by themselves, in five seconds at most.
    let _ = tokio::join!(control, gateway);
    Ok(how)
}
