//! `procs`: live output, replay, stdin, signals, terminals.

mod handed;

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    time::Duration,
};

use handed::{each, eventually, frames, one, read_reply, send_request, text_of, Daemon};
use serde_json::{json, Value};

/// All frames until the end.
fn output(daemon: &Daemon, pid: u64, query: &str) -> Vec<Value> {
    let (status, body) = daemon.request("GET", &format!("procs/{pid}/output?{query}"), b"");
    assert_eq!(status, 200);
    frames(&body)
}

#[test]
fn output_is_replayed_from_offsets_and_then_ends() {
    each(|daemon| {
        let pid = daemon.start_process(json!({ "shell": "echo one; echo two; echo err >&2; exit 5" }));
        daemon.wait(pid);
        let all = output(daemon, pid, "");
        assert_eq!((text_of(&all, "o"), text_of(&all, "e")), ("one\ntwo\n".into(), "err\n".into()));
        let end = all.last().unwrap();
        assert_eq!((&end["t"], &end["r"]["exit_code"]), (&json!("end"), &json!(5)));
        let rest = output(daemon, pid, "stdout_offset=4&stderr_offset=4");
        assert_eq!((text_of(&rest, "o"), text_of(&rest, "e")), ("two\n".into(), String::new()));
    });
}

#[test]
fn output_is_live_and_a_client_that_left_can_attach_again() {
    let daemon = one(json!({}));
    let pid = daemon.start_process(json!({ "argv": ["sh", "-c", "echo a; read x; echo b"], "keep_stdin": true }));
    let mut stream = daemon.connect();
    send_request(&mut stream, "GET", &format!("procs/{pid}/output"), b"");
    let mut seen = Vec::new();
    while !seen.windows(2).any(|window| window == b"a\n") {
        let mut bytes = [0; 4096];
        let count = stream.read(&mut bytes).unwrap();
        seen.extend_from_slice(&bytes[..count]);
    }
    drop(stream);
    let follow = std::thread::scope(|scope| {
        let follow = scope.spawn(|| output(&daemon, pid, "stdout_offset=2"));
        let (status, _) = daemon.request("POST", &format!("procs/{pid}/stdin"), b"go\n");
        assert_eq!(status, 204);
        follow.join().unwrap()
    });
    assert_eq!(text_of(&follow, "o"), "b\n");
}

#[test]
fn what_is_no_longer_kept_is_a_gap() {
    let daemon = one(json!({}));
    let pid = daemon.start_process(json!({ "shell": "seq 400000" }));
    daemon.wait(pid);
    let all = output(&daemon, pid, "");
    assert_eq!(all[0]["t"], "gap");
    let gap = all[0]["n"].as_u64().unwrap();
    assert_eq!(gap + text_of(&all, "o").len() as u64, 2_688_895);
    assert!(text_of(&all, "o").ends_with("400000\n"));
}

#[test]
fn a_reader_that_does_not_read_holds_nobody_up() {
    let daemon = one(json!({}));
    let pid = daemon.start_process(json!({ "shell": "seq 3000000" }));
    let mut stuck = daemon.connect();
    send_request(&mut stuck, "GET", &format!("procs/{pid}/output"), b"");
    assert_eq!(daemon.wait(pid)["exit_code"], 0);
    let (status, body) = read_reply(&stuck);
    assert_eq!(status, 200);
    let all = frames(&body);
    assert!(all.iter().any(|frame| frame["t"] == "gap"));
    assert_eq!(all.last().unwrap()["t"], "end");
}

#[test]
fn stdin_is_written_and_closed() {
    let daemon = one(json!({}));
    let pid = daemon.start_process(json!({ "argv": ["cat"], "keep_stdin": true }));
    let data = vec![b'x'; 300_000];
    for _ in 0..3 {
        assert_eq!(daemon.request("POST", &format!("procs/{pid}/stdin"), &data).0, 204);
    }
    assert_eq!(daemon.request("POST", &format!("procs/{pid}/stdin?eof=1"), b"end").0, 204);
    assert_eq!(daemon.wait(pid)["exit_code"], 0);
    assert_eq!(text_of(&output(&daemon, pid, ""), "o").len(), 900_003);
    let (status, error) = daemon.call("POST", &format!("procs/{pid}/stdin"), json!("late"));
    assert_eq!((status, error["code"].as_str()), (409, Some("stdin_closed")));
}

#[test]
fn processes_are_listed_signalled_and_killed() {
    each(|daemon| {
        let pid = daemon.start_process(json!({ "shell": "setsid sleep 3501 & sleep 3502", "tag": "mine" }));
        eventually(|| daemon.runs("sleep 3501") && daemon.runs("sleep 3502"), "both run");
        let (_, list) = daemon.call("GET", "procs", Value::Null);
        let listed = list["procs"].as_array().unwrap().iter().find(|proc| proc["pid"] == pid).unwrap();
        assert_eq!((&listed["tag"], &listed["running"], &listed["pty"]), (&json!("mine"), &json!(true), &json!(false)));
        let (status, error) = daemon.call("POST", &format!("procs/{pid}/wait"), json!({ "timeout_s": 0.05 }));
        assert_eq!((status, error["code"].as_str()), (408, Some("wait_timeout")));
        let (status, result) = daemon.call("DELETE", &format!("procs/{pid}"), Value::Null);
        assert_eq!((status, result["reason"].as_str()), (200, Some("killed")));
        assert!(!daemon.runs("sleep 3501") && !daemon.runs("sleep 3502"));
        let (status, error) = daemon.call("POST", &format!("procs/{pid}/signal"), json!({ "signal": 15 }));
        assert_eq!((status, error["code"].as_str()), (409, Some("process_ended")));
        assert_eq!(daemon.call("DELETE", "procs/999999", Value::Null).1["code"], "process_not_found");
    });
}

#[test]
fn a_signal_can_reach_the_leader_or_the_whole_tree() {
    each(|daemon| {
        let line =
            "trap 'echo leader; exit 3' USR1; (trap 'echo child; exit' USR1; echo up; while :; do sleep 0.02; done) & \
                    while :; do sleep 0.02; done";
        let pid = daemon.start_process(json!({ "shell": line }));
        let so_far = || text_of(&output(daemon, pid, "follow=0"), "o");
        eventually(|| so_far() == "up\n", "the child is up");
        assert_eq!(daemon.call("POST", &format!("procs/{pid}/signal"), json!({ "signal": 10, "tree": true })).0, 204);
        daemon.wait(pid);
        eventually(|| so_far().contains("leader"), "the leader has answered");
        daemon.call("DELETE", &format!("procs/{pid}"), Value::Null);
    });
}

struct Terminal<'a> {
    daemon: &'a Daemon,
    pid: u64,
}

impl<'a> Terminal<'a> {
    fn open(daemon: &'a Daemon, body: Value) -> Self {
        Self { daemon, pid: daemon.start_process(body) }
    }

    fn typed(&self, keys: &[u8]) {
        assert_eq!(self.daemon.request("POST", &format!("procs/{}/stdin", self.pid), keys).0, 204);
    }

    fn screen(&self) -> String {
        text_of(&output(self.daemon, self.pid, "follow=0"), "p")
    }

    fn shows(&self, text: &str) {
        eventually(|| self.screen().contains(text), &format!("{text:?} on {:?}", self.screen()));
    }
}

#[test]
fn a_terminal_has_job_control() {
    each(|daemon| {
        let body = json!({ "argv": ["/bin/bash", "--norc", "-i"], "pty": { "rows": 24, "cols": 80 }, "env": { "PS1": "ready> " } });
        let terminal = Terminal::open(daemon, body);
        terminal.shows("ready> ");
        terminal.typed(b"tty; stty size; umask; echo TERM=$TERM\n");
        terminal.shows("/dev/pts/");
        terminal.shows("24 80");
        terminal.shows("0022");
        terminal.shows("TERM=xterm-256color");
        terminal.typed(b"sleep 3601\n");
        eventually(|| daemon.runs("sleep 3601"), "it sleeps");
        terminal.typed(b"\x03");
        daemon.wait_gone("sleep 3601");
        terminal.typed(b"echo rc=$?\n");
        terminal.shows("rc=130");
        terminal.typed(b"sleep 3602 | cat\n");
        eventually(|| daemon.runs("sleep 3602"), "it sleeps");
        terminal.typed(b"\x1a");
        terminal.shows("Stopped");
        terminal.typed(b"jobs\n");
        let resize = format!("procs/{}/resize", terminal.pid);
        assert_eq!(daemon.call("POST", &resize, json!({ "rows": 33, "cols": 99 })).0, 204);
        terminal.typed(b"stty size; kill -9 %1\n");
        terminal.shows("33 99");
        // An interactive bash refuses its first exit while it thinks that a job is stopped.
        terminal.typed(b"exit 4\n");
        let _ = daemon.request("POST", &format!("procs/{}/stdin", terminal.pid), b"exit 4\n");
        assert_eq!(daemon.wait(terminal.pid)["exit_code"], 4);
        assert!(!terminal.screen().contains("no job control"));
        assert_eq!(daemon.call("POST", &resize, json!({ "rows": 1, "cols": 1 })).0, 409);
    });
}

#[test]
fn a_user_owns_the_terminal() {
    let daemon = one(json!({}));
    for user in ["root", "nobody"] {
        let body = json!({ "shell": "script -qc tty /dev/null; echo x > $(tty)", "pty": { "rows": 24, "cols": 80 }, "user": user, "cwd": "/" });
        let terminal = Terminal::open(&daemon, body);
        assert_eq!(daemon.wait(terminal.pid)["exit_code"], 0, "{}", terminal.screen());
        terminal.shows("/dev/pts/");
    }
}

#[test]
fn closing_a_terminal_s_input_types_its_end_of_file() {
    let daemon = one(json!({}));
    let terminal = Terminal::open(&daemon, json!({ "argv": ["cat"], "pty": { "rows": 24, "cols": 80 } }));
    assert_eq!(daemon.request("POST", &format!("procs/{}/stdin?eof=1", terminal.pid), b"line\n").0, 204);
    assert_eq!(daemon.wait(terminal.pid)["exit_code"], 0);
}

#[test]
fn a_port_inside_is_reached_by_upgrade() {
    let daemon = one(json!({}));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        stream.write_all(&all).unwrap();
    });
    let mut stream = daemon.connect();
    let upgrade = |stream: &mut UnixStream, port: u16| {
        let head =
            format!("GET /sandmill/v1/tcp/{port} HTTP/1.1\r\nhost: s\r\nconnection: upgrade\r\nupgrade: tcp\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            answer.push(byte[0]);
        }
        String::from_utf8(answer).unwrap()
    };
    assert!(upgrade(&mut stream, port).starts_with("HTTP/1.1 101"));
    stream.write_all(b"through").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    assert_eq!(back, b"through");
    server.join().unwrap();
    assert!(upgrade(&mut daemon.connect(), port).starts_with("HTTP/1.1 502"));
}

#[test]
fn a_client_s_connection_is_handed_over() {
    use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use std::os::fd::AsFd as _;
    let daemon = one(json!({}));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    // The gateway had read the beginning of a request.
    let beginning = b"GET /sandmill/v1/act";
    let mut message = vec![0x01];
    message.extend((beginning.len() as u32).to_be_bytes());
    message.extend(beginning);
    let door = daemon.connect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [accepted.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(&door, &[std::io::IoSlice::new(&message)], &mut control, SendFlags::empty()).unwrap();
    drop((door, accepted));
    client.write_all(b"ivity HTTP/1.1\r\nhost: s\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("idle_s"), "{answer}");
}

#[test]
fn activity_and_usage_are_reported() {
    let daemon = one(json!({}));
    let (_, before) = daemon.call("GET", "activity", Value::Null);
    assert_eq!(before["running"], 0);
    let mut stream = daemon.connect();
    send_request(&mut stream, "POST", "exec", json!({ "shell": "sleep 0.3" }).to_string().as_bytes());
    eventually(|| daemon.call("GET", "activity", Value::Null).1["running"] == 1, "one call runs");
    read_reply(&stream);
    eventually(|| daemon.call("GET", "activity", Value::Null).1["running"] == 0, "no call runs");
    daemon.shell("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done");
    let (_, usage) = daemon.call("GET", "usage", Value::Null);
    assert!(usage["cpu_s"].as_f64().unwrap() > 0.05, "{usage}");
    assert!(usage["pids"].as_u64().unwrap() >= 1, "{usage}");
}
