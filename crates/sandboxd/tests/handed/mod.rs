//! A real sandboxd as a child of the test, with descriptors 3 to 6 as noded hands them over, and a plain client.
#![allow(unsafe_code)] // descriptors at fixed numbers can only be set between fork and exec
#![allow(dead_code)] // each test program uses a part

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{
            net::{UnixListener, UnixStream},
            process::CommandExt as _,
        },
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use base64::{engine::general_purpose::STANDARD, Engine as _};
use serde_json::{json, Value};

/// How the daemon knows what belongs to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Groups {
    Cgroup,
    Marker,
}

/// Where the daemon runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// As an ordinary child of the test: a subreaper, not PID 1.
    Child,
    /// As PID 1 of its own pid namespace.
    Init,
}

pub struct Daemon {
    process: Child,
    place: Place,
    /// Goes with the daemon.
    pub directory: PathBuf,
    cgroup: Option<PathBuf>,
    socket: PathBuf,
}

/// Runs `test` against a daemon of every kind that this machine allows.
pub fn each(test: impl Fn(&Daemon)) {
    test(&Daemon::start(Groups::Marker, Place::Child, json!({})));
    if rustix::process::getuid().is_root() {
        test(&Daemon::start(Groups::Marker, Place::Init, json!({})));
        if cgroup_root().is_some() {
            test(&Daemon::start(Groups::Cgroup, Place::Init, json!({})));
        }
    }
}

/// One daemon with the best that this machine allows.
pub fn one(config: Value) -> Daemon {
    let root = rustix::process::getuid().is_root();
    let groups = if root && cgroup_root().is_some() { Groups::Cgroup } else { Groups::Marker };
    Daemon::start(groups, if root { Place::Init } else { Place::Child }, config)
}

fn cgroup_root() -> Option<PathBuf> {
    let roots = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(PathBuf::from);
    let root = roots.into_iter().find(|root| root.join("cgroup.procs").exists())?;
    let ours = root.join("sandmill");
    fs::create_dir_all(&ours).ok()?;
    Some(ours)
}

impl Daemon {
    pub fn start(groups: Groups, place: Place, config: Value) -> Self {
        Self::start_with(groups, place, config, |_| {})
    }

    /// `prepare` may change the command before its descriptors are set.
    pub fn start_with(groups: Groups, place: Place, config: Value, prepare: impl FnOnce(&mut Command)) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("sandboxd-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let directory = std::env::temp_dir().join(&name);
        fs::create_dir(&directory).unwrap();
        let socket = directory.join("sandboxd.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let cgroup = (groups == Groups::Cgroup).then(|| cgroup_root().unwrap().join(&name));
        let tree = match &cgroup {
            Some(path) => {
                fs::create_dir(path).unwrap();
                File::open(path).unwrap()
            }
            None => File::open("/dev/null").unwrap(),
        };
        let config_path = directory.join("config.json");
        fs::write(&config_path, config.to_string()).unwrap();
        let config = File::open(&config_path).unwrap();
        let (ready, ready_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let mut ready = File::from(ready);
        let binary = env!("CARGO_BIN_EXE_sandboxd");
        let mut command = match place {
            Place::Child => Command::new(binary),
            Place::Init => {
                let mut command = Command::new("unshare");
                command.args(["--pid", "--fork", "--mount-proc", "--kill-child", binary]);
                command
            }
        };
        command.arg("--fds").stdin(Stdio::null());
        prepare(&mut command);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        let high = |fd: OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 100).unwrap();
        let given = [listener.into(), tree.into(), config.into(), ready_write].map(high);
        let raw: Vec<i32> = given.iter().map(|fd: &OwnedFd| fd.as_raw_fd()).collect();
        // SAFETY: the closure makes system calls only, on descriptors that live until the spawn is over.
        unsafe {
            command.pre_exec(move || {
                for (number, fd) in raw.iter().enumerate() {
                    if libc::dup2(*fd, 3 + number as i32) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let process = command.spawn().unwrap();
        drop(given);
        let mut byte = [0];
        ready.read_exact(&mut byte).expect("the daemon gets ready");
        Self { process, place, directory, cgroup, socket }
    }

    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    /// One call on a connection of its own: status and body.
    pub fn request(&self, method: &str, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let mut stream = self.connect();
        send_request(&mut stream, method, path, body);
        read_reply(&stream)
    }

    /// One JSON call: status and answer.
    pub fn call(&self, method: &str, path: &str, body: Value) -> (u16, Value) {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let (status, answer) = self.request(method, path, &body);
        (status, serde_json::from_slice(&answer).unwrap_or(Value::Null))
    }

    /// An exec that must be answered with a result.
    pub fn exec(&self, body: Value) -> Ran {
        let (status, answer) = self.call("POST", "exec", body);
        assert_eq!(status, 200, "{answer}");
        Ran::new(answer)
    }

    pub fn shell(&self, line: &str) -> Ran {
        self.exec(json!({ "shell": line }))
    }

    /// An exec that must be refused: its error's code.
    pub fn refused(&self, body: Value) -> String {
        let (status, answer) = self.call("POST", "exec", body);
        assert!(status >= 400, "{answer}");
        answer["code"].as_str().unwrap().to_owned()
    }

    pub fn start_process(&self, body: Value) -> u64 {
        let (status, answer) = self.call("POST", "procs", body);
        assert_eq!(status, 200, "{answer}");
        answer["pid"].as_u64().unwrap()
    }

    pub fn wait(&self, pid: u64) -> Value {
        let (status, answer) = self.call("POST", &format!("procs/{pid}/wait"), json!({ "timeout_s": 20 }));
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// Whether a process with these arguments runs (as seen by the test, whose pid namespace holds the daemon's).
    pub fn runs(&self, arguments: &str) -> bool {
        let wanted = arguments.replace(' ', "\0") + "\0";
        fs::read_dir("/proc").unwrap().flatten().any(|entry| {
            let path = entry.path().join("cmdline");
            fs::read(path).is_ok_and(|cmdline| cmdline == wanted.as_bytes())
        })
    }

    /// Waits until no process with these arguments runs.
    pub fn wait_gone(&self, arguments: &str) {
        eventually(|| !self.runs(arguments), &format!("{arguments} is gone"));
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // An ordinary child ends what it started when it is told to stop; of an init all ends with it.
        if self.place == Place::Init {
            // unshare's --kill-child is not always heard (a run now and then left a daemon), so its child goes first.
            let id = self.process.id();
            let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
            for child in children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()) {
                let child = rustix::process::Pid::from_raw(child).unwrap();
                let _ = rustix::process::kill_process(child, rustix::process::Signal::KILL);
            }
            let _ = self.process.kill();
        }
        let pid = rustix::process::Pid::from_child(&self.process);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let deadline = Instant::now() + Duration::from_secs(5);
        while matches!(self.process.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.process.kill();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        if let Some(cgroup) = &self.cgroup {
            let _ = fs::write(cgroup.join("cgroup.kill"), "1");
            let deadline = Instant::now() + Duration::from_secs(2);
            while cgroup.exists() && Instant::now() < deadline {
                for group in fs::read_dir(cgroup).into_iter().flatten().flatten() {
                    let _ = fs::remove_dir(group.path());
                }
                let _ = fs::remove_dir(cgroup);
            }
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// What an exec gave.
#[derive(Debug)]
pub struct Ran {
    pub raw: Value,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

impl Ran {
    pub fn new(raw: Value) -> Self {
        let bytes = |name: &str| STANDARD.decode(raw[name].as_str().unwrap()).unwrap();
        Self { stdout: bytes("stdout"), stderr: bytes("stderr"), raw }
    }

    pub fn code(&self) -> Option<i64> {
        self.raw["exit_code"].as_i64()
    }

    pub fn signal(&self) -> Option<i64> {
        self.raw["signal"].as_i64()
    }

    pub fn reason(&self) -> &str {
        self.raw["reason"].as_str().unwrap()
    }

    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
}

pub fn send_request(stream: &mut UnixStream, method: &str, path: &str, body: &[u8]) {
    let length = body.len();
    let head = format!(
        "{method} /sandmill/v1/{path} HTTP/1.1\r\nhost: s\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
}

/// Reads one answer; the connection isn't used further.
pub fn read_reply(stream: &UnixStream) -> (u16, Vec<u8>) {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("{line}")).parse().unwrap();
    let (mut length, mut chunked) = (0, false);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).unwrap();
        let header = header.trim().to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        }
        chunked |= header == "transfer-encoding: chunked";
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    while chunked {
        let mut size = String::new();
        reader.read_line(&mut size).unwrap();
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        let mut chunk = vec![0; size + 2];
        reader.read_exact(&mut chunk).unwrap();
        chunked = size > 0;
        body.extend_from_slice(&chunk[..size]);
    }
    (status, body)
}

/// The frames of an output stream, with their bytes as text.
pub fn frames(mut body: &[u8]) -> Vec<Value> {
    let mut all = Vec::new();
    while !body.is_empty() {
        let length = u32::from_be_bytes(body[..4].try_into().unwrap()) as usize;
        let frame: Frame = rmp_serde::from_slice(&body[4..4 + length]).unwrap();
        let text = frame.d.map(|bytes| String::from_utf8_lossy(&bytes.0).into_owned());
        all.push(json!({ "t": frame.t, "s": frame.s, "off": frame.off, "n": frame.n, "d": text, "r": frame.r }));
        body = &body[4 + length..];
    }
    all
}

#[derive(serde::Deserialize)]
struct Frame {
    t: String,
    s: Option<String>,
    off: Option<u64>,
    n: Option<u64>,
    d: Option<Bytes>,
    r: Option<Value>,
}

struct Bytes(Vec<u8>);

impl<'de> serde::Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Bytes;
            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(Bytes(bytes.to_vec()))
            }
        }
        deserializer.deserialize_bytes(Visitor)
    }
}

/// The text of one stream in frames.
pub fn text_of(frames: &[Value], stream: &str) -> String {
    frames.iter().filter(|frame| frame["t"] == stream).filter_map(|frame| frame["d"].as_str()).collect()
}

/// Waits up to five seconds for something to become true.
pub fn eventually(mut holds: impl FnMut() -> bool, what: &str) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(5), "not within five seconds: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
