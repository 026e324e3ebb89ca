//! From the exec to the first connection.

use std::{
    fs,
    io::{self, Read as _},
    net::SocketAddr,
    os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
    os::unix::net::UnixListener as StdUnixListener,
    path::Path,
    rc::Rc,
    time::Duration,
};

use rustix::{
    process::{DumpableBehavior, Pid},
    thread::CapabilitySet,
};
use sandmill_wire::{DropTo, SandboxdConfig, CGROUP_FD, CONFIG_FD, LISTEN_FD, READY_FD, TETHER_FD};
use tokio::{
    net::{TcpListener, UnixListener},
    task::LocalSet,
};

use crate::{
    activity::Activity,
    app::App,
    e2b,
    proc::{Means, Table},
    server,
    session::Sessions,
    sys,
    tether::Tether,
};

const USAGE: &str = "usage: sandboxd --fds | sandboxd --listen ADDRESS:PORT --config FILE|- [--token-env NAME]";
/// Threads for blocking file work, at most; they end after a second without work.
const FILE_THREADS: usize = 8;
/// Room for a configuration without a large environment.
const USUAL_CONFIG_BYTES: usize = 16 << 10;

/// How the daemon was started.
struct Given {
    config: Source,
    door: Door,
    tree: Option<OwnedFd>,
    ready: Option<OwnedFd>,
    /// Ends when noded does.
    noded: Option<OwnedFd>,
}

/// Where the configuration comes from.
enum Source {
    Known(Box<SandboxdConfig>),
    /// A file that can be read at once, or a pipe on which it comes when somebody wants this sandbox.
    Descriptor(OwnedFd),
}

impl Source {
    fn drop_to(&self) -> DropTo {
        match self {
            Self::Known(config) => config.drop_to.clone(),
            Self::Descriptor(_) => DropTo::default(),
        }
    }

    /// None: nobody wants this sandbox any more, since whoever held the other end is gone.
    fn read(self) -> io::Result<Option<SandboxdConfig>> {
        let text = match self {
            Self::Known(config) => return Ok(Some(*config)),
            Self::Descriptor(descriptor) => {
                let mut text = Vec::with_capacity(USUAL_CONFIG_BYTES);
                fs::File::from(descriptor).read_to_end(&mut text)?;
                text
            }
        };
        if text.is_empty() {
            return Ok(None);
        }
        parse(&text).map(Some).map_err(io::Error::other)
    }

    /// Whether nobody is known yet to want this sandbox.
    fn comes_later(&self) -> bool {
        let Self::Descriptor(descriptor) = self else { return false };
        let pipe =
            rustix::fs::fstat(descriptor).map(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_fifo());
        pipe.unwrap_or(false)
    }
}

enum Door {
    Unix(StdUnixListener),
    Tcp(SocketAddr),
}

/// Runs the daemon until it is told to stop. Errors are for a person.
pub fn run() -> Result<(), String> {
    sys::close_on_exec();
    let given = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [flag] if flag == "--fds" => from_descriptors()?,
        arguments => from_arguments(arguments)?,
    };
    let signals = sys::prepare().map_err(|error| format!("signals: {error}"))?;
    let secret = harden(&given.config.drop_to())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(FILE_THREADS)
        .thread_keep_alive(Duration::from_secs(1))
        .thread_stack_size(256 << 10)
        .build()
        .map_err(|error| format!("the event loop: {error}"))?;
    LocalSet::new().block_on(&runtime, serve(given, signals, secret)).map_err(|error| format!("serving: {error}"))
}

async fn serve(given: Given, signals: sys::Signals, secret: sys::Secret) -> io::Result<()> {
    let means = Means::gather(given.tree, secret);
    if given.config.comes_later() {
        means.preheat();
    }
    // Connections queue up at the listener from now on. Nothing else runs yet, so the read may block.
    tell_ready(given.ready);
    let Some(config) = given.config.read()? else { return Ok(()) };
    make_workdir(&config);
    let tether = Tether::default();
    if let (Some(noded), Some(lease)) = (given.noded, config.lease) {
        tether.tie(noded, lease)?;
    }
    let procs = Table::new(config.clone(), means);
    let app = Rc::new(App {
        e2b: e2b::State::new(&config),
        config,
        procs: procs.clone(),
        sessions: Sessions::default(),
        activity: Activity::new(),
        tether,
    });
    let served = async {
        match given.door {
            Door::Unix(listener) => {
                listener.set_nonblocking(true)?;
                let listener = UnixListener::from_std(listener)?;
                Err(server::unix(Rc::clone(&app), listener).await)
            }
            Door::Tcp(address) => {
                let listener = TcpListener::bind(address).await?;
                println!("sandboxd: listening on {}", listener.local_addr()?);
                Err(server::tcp(Rc::clone(&app), listener).await)
            }
        }
    };
    tokio::select! {
        stopped = app.procs.reap(signals) => {
            procs.shut_down().await;
            stopped
        }
        failed = served => failed,
        () = app.tether.torn(&app.activity) => {
            eprintln!("sandboxd: noded has been gone for longer than the lease: this sandbox ends");
            procs.shut_down().await;
            Ok(())
        }
    }
}

/// noded waits for this byte; a noded that is gone is none of our business.
fn tell_ready(ready: Option<OwnedFd>) {
    if let Some(ready) = ready {
        let _ = rustix::io::write(&ready, &[1]);
    }
}

/// Descriptors 3 to 7, as noded hands them over; whoever watches no lease leaves the last one out.
fn from_descriptors() -> Result<Given, String> {
    let noded = inherited(TETHER_FD).ok();
    let [listen, tree, config, ready] = [LISTEN_FD, CGROUP_FD, CONFIG_FD, READY_FD].map(inherited);
    let (listen, tree, config, ready) = (listen?, tree?, config?, ready?);
    Ok(Given {
        config: Source::Descriptor(config),
        door: Door::Unix(StdUnixListener::from(listen)),
        tree: Some(tree),
        ready: Some(ready),
        noded,
    })
}

/// Takes a descriptor that was given by number, and keeps it from children.
#[allow(unsafe_code)] // a number must become a descriptor somewhere
fn inherited(number: i32) -> Result<OwnedFd, String> {
    // SAFETY: a borrow for the one call that says whether the number is an open descriptor at all.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_setfd(borrowed.as_fd(), rustix::io::FdFlags::CLOEXEC)
        .map_err(|error| format!("descriptor {number}: {error}; {USAGE}"))?;
    // SAFETY: it is open, it was given to this process by its number, and each number is taken once, at the start.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn from_arguments(arguments: &[String]) -> Result<Given, String> {
    let (mut listen, mut config, mut token) = (None, None, None);
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let value = words.next().ok_or(USAGE)?;
        match word.as_str() {
            "--listen" => listen = Some(value.parse().map_err(|_| format!("{value} is not ADDRESS:PORT"))?),
            "--config" => config = Some(value.clone()),
            "--token-env" => {
                token = Some(std::env::var(value).map_err(|_| format!("the environment variable {value} is not set"))?);
            }
            _ => return Err(USAGE.to_owned()),
        }
    }
    let (Some(listen), Some(path)) = (listen, config) else { return Err(USAGE.to_owned()) };
    let text = if path == "-" { io::read_to_string(io::stdin()) } else { fs::read_to_string(&path) };
    let mut config = parse(text.map_err(|error| format!("{path}: {error}"))?.as_bytes())?;
    config.token = token.or(config.token);
    Ok(Given { config: Source::Known(Box::new(config)), door: Door::Tcp(listen), tree: None, ready: None, noded: None })
}

fn parse(text: &[u8]) -> Result<SandboxdConfig, String> {
    serde_json::from_slice(text).map_err(|error| format!("the configuration: {error}"))
}

/// What protects the daemon from the processes that it starts, and them from each other's leftovers.
fn harden(drop_to: &DropTo) -> Result<sys::Secret, String> {
    let step = |what: &'static str| move |error: rustix::io::Errno| format!("{what}: {error}");
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // Else any process of the same user could trace this one, or read its memory and environment.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(step("non-dumpable"))?;
    if std::process::id() != 1 {
        rustix::process::set_child_subreaper(Some(Pid::INIT)).map_err(step("subreaper"))?;
    }
    if drop_to.no_new_privs {
        rustix::thread::set_no_new_privs(true).map_err(step("no_new_privs"))?;
    }
    // Children inherit the bounding set, so it is narrowed here, once; our own permitted capabilities stay.
    for capability in CapabilitySet::all() {
        let keeps = drop_to.bounding & capability.bits() != 0;
        if !keeps && rustix::thread::capability_is_in_bounding_set(capability).unwrap_or(false) {
            rustix::thread::remove_capability_from_bounding_set(capability).map_err(step("capability bounding set"))?;
        }
    }
    if !drop_to.deny_clone3 {
        return Ok(sys::Secret::default());
    }
    sys::deny_clone3().map_err(|error| format!("the filter against clone3: {error}"))
}

/// The working directory of the image's configuration need not be in any layer.
fn make_workdir(config: &SandboxdConfig) {
    if let Some(workdir) = &config.workdir {
        if let Err(error) = fs::create_dir_all(Path::new(workdir)) {
            eprintln!("sandboxd: the working directory {workdir} can't be made: {error}");
        }
    }
}
