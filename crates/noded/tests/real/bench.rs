//! A noded of its own for a test, and the smallest HTTP client that does.

use std::{
    fs,
    io::{Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use serde_json::{json, Value};

/// A running noded on a state directory that goes with it.
pub struct Noded {
    pub dir: tempfile::TempDir,
    pub child: Child,
    extra: Vec<String>,
}

/// None, with the reason on stderr, where the tests of this folder can't run.
pub fn noded(extra: &[&str]) -> Option<Noded> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return None;
    }
    let Some(sandboxd) = sandboxd() else {
        eprintln!("skipped: no sandboxd is built; SANDMILL_SANDBOXD says where one is");
        return None;
    };
    let mut extra: Vec<String> = extra.iter().map(|word| (*word).to_owned()).collect();
    extra.extend(["--sandboxd".to_owned(), sandboxd.display().to_string()]);
    let dir = tempfile::Builder::new().prefix("sandmill-noded-").tempdir().expect("a directory");
    let child = start(dir.path(), &extra);
    Some(Noded { dir, child, extra })
}

fn sandboxd() -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_BIN_EXE_noded")).with_file_name("sandboxd");
    let candidates = std::env::var_os("SANDMILL_SANDBOXD").map(PathBuf::from).into_iter().chain([beside]);
    candidates.into_iter().find(|path| path.is_file())
}

fn start(dir: &Path, extra: &[String]) -> Child {
    let child = Command::new(env!("CARGO_BIN_EXE_noded"))
        .args(["--data-listen", "127.0.0.1:0", "--state-dir"])
        .arg(dir)
        .args(extra)
        .stdin(Stdio::null())
        .spawn()
        .expect("noded starts");
    let up = || {
        let text = fs::read_to_string(dir.join("noded.json")).ok()?;
        let said: Value = serde_json::from_str(&text).ok()?;
        (said["pid"] == child.id()).then_some(())
    };
    until("noded is ready", up);
    child
}

/// Waits at most ten seconds for something.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within ten seconds: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process of the host has ended, for [`until`].
pub fn has_ended(pid: impl std::fmt::Display) -> Option<()> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    (stat.is_empty() || stat.contains(") Z ")).then_some(())
}

pub fn new_id() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("i{:010}{:09}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The least spec, with `more` over it.
pub fn spec(more: Value) -> Value {
    let lease = json!({"ttl_s": 300.0, "renew_on_use": true});
    let mut spec = json!({"id": new_id(), "image": "host", "token": "t", "lease": lease});
    for (name, value) in more.as_object().into_iter().flatten() {
        spec[name] = value.clone();
    }
    spec
}

impl Noded {
    pub fn call(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        http(self.dir.path(), "noded.sock", method, path, body)
    }

    /// A running sandbox's id.
    pub fn create(&self, more: Value) -> String {
        let spec = spec(more);
        let (status, info) = self.call("POST", "/v1/sandboxes", &spec);
        assert_eq!(status, 201, "{info}");
        spec["id"].as_str().expect("an id").to_owned()
    }

    pub fn info(&self, id: &str) -> Value {
        let (status, info) = self.call("GET", &format!("/v1/sandboxes/{id}"), &Value::Null);
        assert_eq!(status, 200, "{info}");
        info
    }

    /// What `leases.json` says of a sandbox.
    pub fn kept_lease(&self, id: &str) -> Value {
        let text = std::fs::read(self.dir.path().join("leases.json")).unwrap_or_default();
        serde_json::from_slice::<Value>(&text).unwrap_or_default()[id].clone()
    }

    pub fn delete(&self, id: &str) {
        let (status, answer) = self.call("DELETE", &format!("/v1/sandboxes/{id}"), &Value::Null);
        assert_eq!(status, 204, "{answer}");
    }

    /// Runs a shell line in a sandbox; standard output, and the whole result.
    pub fn sh(&self, id: &str, line: &str) -> (String, Value) {
        let dir = self.dir.path().join("sandboxes").join(id);
        let (status, result) = http(&dir, "sandboxd.sock", "POST", "/sandmill/v1/exec", &json!({ "shell": line }));
        assert_eq!(status, 200, "{result}");
        (base64(result["stdout"].as_str().unwrap_or_default()).trim_end().to_owned(), result)
    }

    pub fn restart(&mut self, signal: rustix::process::Signal) {
        self.stop(signal);
        self.child = start(self.dir.path(), &self.extra);
    }

    pub fn stop(&mut self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        if self.child.try_wait().expect("our child").is_none() {
            rustix::process::kill_process(pid, signal).expect("our child");
        }
        self.child.wait().expect("our child");
    }

    /// This node's directories in all hierarchies of cgroups, sandboxes' and pooled ones.
    pub fn groups(&self) -> Vec<PathBuf> {
        let (_, health) = self.call("GET", "/v1/health", &Value::Null);
        groups_of(health["node_id"].as_str().expect("a node id"))
    }
}

pub fn groups_of(node_id: &str) -> Vec<PathBuf> {
    let hierarchies = fs::read_dir("/sys/fs/cgroup").expect("cgroups").flatten().map(|entry| entry.path());
    let nodes = hierarchies.chain([PathBuf::from("/sys/fs/cgroup")]).map(|top| top.join("sandmill").join(node_id));
    let inside = nodes.filter_map(|node| fs::read_dir(node).ok()).flatten().flatten();
    inside.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

impl Drop for Noded {
    fn drop(&mut self) {
        self.stop(rustix::process::Signal::TERM);
    }
}

fn http(dir: &Path, socket: &str, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let dir = fs::File::open(dir).expect("the directory of the socket");
    let mut stream = UnixStream::connect(format!("/proc/self/fd/{}/{socket}", dir.as_raw_fd())).expect("a listener");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a deadline");
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).expect("a request is taken");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    let text = String::from_utf8_lossy(&answer);
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("a status");
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

fn base64(text: &str) -> String {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut bits, mut count, mut out) = (0_u32, 0, Vec::new());
    for value in text.bytes().filter_map(digit) {
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}
