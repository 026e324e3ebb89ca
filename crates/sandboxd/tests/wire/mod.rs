//! The real binary, listening on a port of its own, and a client that shows what is on the wire.
#![allow(dead_code)] // each test file uses a part of it

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use serde_json::Value;

/// A running sandboxd, ended when dropped, with a directory for the test's files.
pub struct Daemon {
    child: Child,
    address: String,
    directory: PathBuf,
}

pub struct Response {
    pub status: u16,
    pub headers: String,
    pub body: Vec<u8>,
}

impl Daemon {
    pub fn start() -> Self {
        Self::start_in(&std::env::temp_dir())
    }

    pub fn start_in(parent: &Path) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("sandboxd-it-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let directory = parent.join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let config = directory.join("config.json");
        std::fs::write(&config, r#"{"id":"itest","env":{"FROM_CONFIG":"1"}}"#).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_sandboxd"))
            .args(["--listen", "127.0.0.1:0", "--config"])
            .arg(&config)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit(' ').next().unwrap().to_owned();
        Self { child, address, directory }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    /// Sends a request's beginning, and its body if there is one.
    pub fn open(&self, line: &str, headers: &[(&str, &str)], body: Option<&[u8]>) -> TcpStream {
        let mut stream = self.connect();
        let mut head = format!("{line} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if let Some(body) = body {
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        if let Some(body) = body {
            // A daemon that refuses early may close before all is sent; its answer says so.
            let _ = stream.write_all(body);
        }
        stream
    }

    pub fn call(&self, line: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        read_response(self.open(line, headers, Some(body)))
    }

    pub fn get(&self, path: &str) -> Response {
        read_response(self.open(&format!("GET {path}"), &[], None))
    }

    /// A call with JSON both ways; panics unless it succeeds.
    pub fn json(&self, path: &str, body: Value) -> Value {
        let response = self.post(path, body);
        assert!(response.status < 300, "{path}: {} {}", response.status, response.text());
        if response.body.is_empty() {
            return Value::Null;
        }
        response.json()
    }

    pub fn post(&self, path: &str, body: Value) -> Response {
        self.call(&format!("POST {path}"), &[("content-type", "application/json")], body.to_string().as_bytes())
    }

    pub fn fs(&self, body: Value) -> Value {
        self.json("/sandmill/v1/fs", body)
    }

    /// Runs a command to its end; gives the result of Sandmill's exec call.
    pub fn exec(&self, argv: &[&str], user: Option<&str>) -> Value {
        self.json("/sandmill/v1/exec", serde_json::json!({"argv": argv, "user": user}))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl Response {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// Reads to the end of the connection; a chunked body is put together.
pub fn read_response(mut stream: TcpStream) -> Response {
    let mut all = Vec::new();
    let read = stream.read_to_end(&mut all);
    assert!(read.is_ok() || !all.is_empty(), "no answer: {read:?}");
    let end = all.windows(4).position(|window| window == b"\r\n\r\n").expect("an answer with a head") + 4;
    let headers = String::from_utf8_lossy(&all[..end]).to_ascii_lowercase();
    let status = headers[9..12].parse().unwrap();
    let rest = &all[end..];
    let body = if headers.contains("transfer-encoding: chunked") { unchunk(rest) } else { rest.to_vec() };
    Response { status, headers, body }
}

fn unchunk(mut data: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = data.windows(2).position(|window| window == b"\r\n") {
        let length = usize::from_str_radix(std::str::from_utf8(&data[..end]).unwrap(), 16).unwrap();
        if length == 0 {
            break;
        }
        body.extend_from_slice(&data[end + 2..end + 2 + length]);
        data = &data[end + 4 + length..];
    }
    body
}

pub fn escape(path: &[u8]) -> String {
    path.iter().map(|byte| format!("%{byte:02x}")).collect()
}

/// Waits for something that happens soon.
pub fn eventually(what: &str, check: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while !check() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
