//! E2B's services against the real daemon, on the wire.

mod wire;

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    os::unix::ffi::OsStrExt as _,
    time::{Duration, Instant},
};

use base64::{engine::general_purpose::STANDARD, Engine as _};
use serde_json::{json, Value};
use wire::{escape, eventually, read_response, Daemon};

const STREAM: (&str, &str) = ("content-type", "application/connect+json");

fn envelope(message: &[u8]) -> Vec<u8> {
    let mut data = vec![0];
    data.extend_from_slice(&(message.len() as u32).to_be_bytes());
    data.extend_from_slice(message);
    data
}

fn envelopes(mut body: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut found = Vec::new();
    while body.len() >= 5 {
        let length = u32::from_be_bytes(body[1..5].try_into().unwrap()) as usize;
        found.push((body[0], body[5..5 + length].to_vec()));
        body = &body[5 + length..];
    }
    assert!(body.is_empty());
    found
}

/// A finished stream of process events.
#[derive(Debug, Default)]
struct Run {
    pid: u64,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    pty: Vec<u8>,
    end: Value,
    error: Value,
}

fn run_of(body: &[u8]) -> Run {
    let mut run = Run::default();
    for (flags, message) in envelopes(body) {
        let message: Value = serde_json::from_slice(&message).unwrap();
        if flags == 2 {
            run.error = message["error"].clone();
            continue;
        }
        let event = &message["event"];
        if let Some(pid) = event["start"]["pid"].as_u64() {
            run.pid = pid;
        }
        for (name, stream) in [("stdout", &mut run.stdout), ("stderr", &mut run.stderr), ("pty", &mut run.pty)] {
            if let Some(data) = event["data"][name].as_str() {
                stream.extend(STANDARD.decode(data).unwrap());
            }
        }
        if event["end"].is_object() {
            run.end = event["end"].clone();
        }
    }
    run
}

fn start(daemon: &Daemon, request: Value, headers: &[(&str, &str)]) -> Run {
    let headers: Vec<_> = [STREAM].iter().chain(headers).copied().collect();
    let body = envelope(request.to_string().as_bytes());
    let response = daemon.call("POST /process.Process/Start", &headers, &body);
    assert_eq!(response.status, 200, "{}", response.text());
    run_of(&response.body)
}

fn shell(script: &str) -> Value {
    json!({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": false})
}

/// Starts a process and gives the open stream, after its start event.
fn open(daemon: &Daemon, path: &str, request: Value) -> (u64, TcpStream) {
    let body = envelope(request.to_string().as_bytes());
    let mut stream = daemon.open(&format!("POST {path}"), &[STREAM], Some(&body));
    let mut seen = Vec::new();
    let pid = loop {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        seen.push(byte[0]);
        let text = String::from_utf8_lossy(&seen);
        if let Some(at) = text.find("\"pid\":").filter(|_| text.ends_with('}')) {
            break text[at + 6..].trim_end_matches('}').parse().unwrap();
        }
        assert!(!text.contains("\"error\""), "{text}");
    };
    (pid, stream)
}

fn running(daemon: &Daemon) -> Vec<u64> {
    let list = daemon.json("/process.Process/List", json!({}));
    list["processes"].as_array().unwrap().iter().map(|process| process["pid"].as_u64().unwrap()).collect()
}

#[test]
fn output_and_codes_are_exact() {
    let daemon = Daemon::start();
    let run = start(&daemon, shell(r"printf 'a\r\nb'; printf '1\0002' >&2; exit 3"), &[]);
    assert_eq!((run.stdout.as_slice(), run.stderr.as_slice()), (&b"a\r\nb"[..], &b"1\x002"[..]));
    assert_eq!(run.end, json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"}));
    assert_eq!(run.error, Value::Null);
    let end = |script| start(&daemon, shell(script), &[]).end;
    assert_eq!(end("exit 255")["exitCode"], 255);
    let killed = end("kill -9 $$");
    assert_eq!((killed["exitCode"].as_i64(), killed["exited"].as_bool()), (Some(137), Some(false)));
    assert_eq!(end("kill -SEGV $$")["exitCode"], 139);
    let ok = end("true");
    assert_eq!((ok["exitCode"].as_i64(), ok.get("error")), (Some(0), None));
}

#[test]
fn what_cannot_start_is_a_typed_error() {
    let daemon = Daemon::start();
    let error = |process: Value| start(&daemon, json!({ "process": process }), &[]).error["code"].clone();
    assert_eq!(error(json!({"cmd": "/no/such/program"})), "invalid_argument");
    assert_eq!(error(json!({"cmd": "/bin/sh", "cwd": "/nope"})), "invalid_argument");
    assert_eq!(error(json!({"cmd": "/bin/sh", "args": ["-c", "a\u{0}b"]})), "invalid_argument");
    let unknown = format!("Basic {}", STANDARD.encode("nobody-here:"));
    let run = start(&daemon, shell("true"), &[("authorization", &unknown)]);
    assert_eq!(run.error["code"], "unauthenticated");
    let nobody = format!("Basic {}", STANDARD.encode("12345:"));
    assert_eq!(start(&daemon, shell("id -u"), &[("authorization", &nobody)]).stdout, b"12345\n");
}

#[test]
fn a_timeout_ends_all_that_was_started_and_keeps_the_output() {
    let daemon = Daemon::start();
    let begun = Instant::now();
    let run = start(&daemon, shell("echo so far; setsid sleep 98765 & sleep 98765"), &[("connect-timeout-ms", "400")]);
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!((run.stdout.as_slice(), &run.error["code"]), (&b"so far\n"[..], &json!("deadline_exceeded")));
    eventually("everything has ended", || daemon.exec(&["pgrep", "-f", "^sleep 98765"], None)["exit_code"] != 0);
    let run = start(&daemon, shell("sleep 0.2; echo ok"), &[("connect-timeout-ms", "0")]);
    assert_eq!(run.stdout, b"ok\n");
}

#[test]
fn a_background_child_does_not_hold_up_the_end() {
    let daemon = Daemon::start();
    let begun = Instant::now();
    let run = start(&daemon, shell("sleep 30 & echo done"), &[]);
    assert_eq!((run.stdout.as_slice(), run.end["exitCode"].as_i64()), (&b"done\n"[..], Some(0)));
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_client_can_leave_come_back_and_kill() {
    let daemon = Daemon::start();
    let script = "(setsid sleep 87654 &) ; while sleep 0.05; do echo tick; done";
    let (pid, stream) = open(&daemon, "/process.Process/Start", shell(script));
    stream.shutdown(Shutdown::Both).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(running(&daemon).contains(&pid));
    let (same, mut stream) = open(&daemon, "/process.Process/Connect", json!({"process": {"pid": pid}}));
    assert_eq!(same, pid);
    let mut some = [0; 64];
    assert!(stream.read(&mut some).unwrap() > 0);
    daemon.json("/process.Process/SendSignal", json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}));
    assert_ne!(daemon.exec(&["pgrep", "-f", "^sleep 87654"], None)["exit_code"], 0);
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(String::from_utf8_lossy(&rest).contains("\"exitCode\":137"));
    let again = daemon.post("/process.Process/SendSignal", json!({"process": {"pid": pid}, "signal": 9}));
    assert_eq!((again.status, again.code().as_str()), (404, "not_found"));
    // How it ended can still be learnt.
    let body = envelope(json!({"process": {"pid": pid}}).to_string().as_bytes());
    let late = run_of(&daemon.call("POST /process.Process/Connect", &[STREAM], &body).body);
    assert_eq!((late.pid, late.end["exitCode"].as_i64()), (pid, Some(137)));
}

#[test]
fn a_slow_client_gets_all_of_a_fast_process() {
    const SIZE: usize = 40_000_000;
    let daemon = Daemon::start();
    let body = envelope(shell(&format!("head -c {SIZE} /dev/zero")).to_string().as_bytes());
    let stream = daemon.open("POST /process.Process/Start", &[STREAM], Some(&body));
    std::thread::sleep(Duration::from_millis(500));
    let run = run_of(&read_response(stream).body);
    assert_eq!((run.stdout.len(), run.end["exitCode"].as_i64()), (SIZE, Some(0)));
}

#[test]
fn input_arrives_in_order_and_ends() {
    let daemon = Daemon::start();
    let cat = json!({"process": {"cmd": "cat"}, "tag": "the-cat", "stdin": true});
    let (pid, stream) = open(&daemon, "/process.Process/Start", cat);
    let by_pid = json!({ "pid": pid });
    let stdin = |text: &str| json!({"stdin": STANDARD.encode(text)});
    daemon.json("/process.Process/SendInput", json!({"process": by_pid, "input": stdin("one ")}));
    let parts = [
        json!({"start": {"process": {"tag": "the-cat"}}}),
        json!({"data": {"input": stdin("two ")}}),
        json!({"keepalive": {}}),
        json!({"data": {"input": stdin("three")}}),
    ];
    let body: Vec<u8> = parts.iter().flat_map(|part| envelope(part.to_string().as_bytes())).collect();
    let answer = daemon.call("POST /process.Process/StreamInput", &[STREAM], &body);
    assert_eq!(envelopes(&answer.body), [(0, b"{}".to_vec()), (2, b"{}".to_vec())]);
    let wrong = daemon.post("/process.Process/SendInput", json!({"process": by_pid, "input": {"pty": "aGk="}}));
    assert_eq!(wrong.code(), "failed_precondition");
    daemon.json("/process.Process/CloseStdin", json!({"process": by_pid}));
    let mut rest = Vec::new();
    let mut stream = stream;
    stream.read_to_end(&mut rest).unwrap();
    let text = String::from_utf8_lossy(&rest).into_owned();
    let data: Vec<u8> = text
        .match_indices("\"stdout\":\"")
        .flat_map(|(at, found)| {
            let rest = &text[at + found.len()..];
            STANDARD.decode(&rest[..rest.find('"').unwrap()]).unwrap()
        })
        .collect();
    assert_eq!(data, b"one two three");
}

#[test]
fn a_terminal_is_one_and_can_be_resized() {
    let daemon = Daemon::start();
    let request = json!({
        "process": {"cmd": "/bin/sh", "args": ["-c", "tty; read line; stty size; exit 5"], "envs": {"TERM": "xterm"}},
        "pty": {"size": {"rows": 24, "cols": 80}},
    });
    let (pid, mut stream) = open(&daemon, "/process.Process/Start", request);
    daemon
        .json("/process.Process/Update", json!({"process": {"pid": pid}, "pty": {"size": {"rows": 30, "cols": 100}}}));
    let typed = json!({"process": {"pid": pid}, "input": {"pty": STANDARD.encode("go\n")}});
    daemon.json("/process.Process/SendInput", typed);
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    let text = String::from_utf8_lossy(&rest).into_owned();
    assert!(text.contains("\"exitCode\":5"), "{text}");
    let shown: String = text
        .match_indices("\"pty\":\"")
        .map(|(at, found)| {
            let rest = &text[at + found.len()..];
            String::from_utf8(STANDARD.decode(&rest[..rest.find('"').unwrap()]).unwrap()).unwrap()
        })
        .collect();
    assert!(shown.contains("30 100"), "{shown}");
}

#[test]
fn variables_reach_commands_terminals_and_background() {
    let daemon = Daemon::start();
    daemon.json(
        "/init",
        json!({"envVars": {"FROM_INIT": "2"}, "defaultUser": "12345", "defaultWorkdir": "/tmp", "accessToken": "x"}),
    );
    let envs = daemon.get("/envs").json();
    assert_eq!((&envs["FROM_CONFIG"], &envs["FROM_INIT"]), (&json!("1"), &json!("2")));
    let script = "echo $FROM_CONFIG $FROM_INIT $FROM_CALL $(id -u) $(pwd)";
    let process = json!({"cmd": "/bin/sh", "args": ["-c", script], "envs": {"FROM_CALL": "3"}});
    assert_eq!(start(&daemon, json!({ "process": process }), &[]).stdout, b"1 2 3 12345 /tmp\n");
    let run = start(&daemon, json!({"process": process, "pty": {"size": {"rows": 24, "cols": 80}}}), &[]);
    assert_eq!(run.pty, b"1 2 3 12345 /tmp\r\n");
}

#[test]
fn protobuf_is_spoken_too() {
    let daemon = Daemon::start();
    // StartRequest{process{cmd: "/bin/echo", args: ["hi"]}}
    let config = [&b"\x0a\x09/bin/echo\x12\x02hi"[..]].concat();
    let request = [&[0x0a, config.len() as u8][..], &config].concat();
    let proto = [("content-type", "application/connect+proto")];
    let answer = daemon.call("POST /process.Process/Start", &proto, &envelope(&request));
    assert!(answer.headers.contains("content-type: application/connect+proto"));
    let found = envelopes(&answer.body);
    // EventResponse{event{start}}, {event{data{stdout: "hi\n"}}}, {event{end}}, then the end of the stream.
    assert_eq!(found[0].1[..4], [0x0a, found[0].1.len() as u8 - 2, 0x0a, found[0].1.len() as u8 - 4]);
    assert_eq!(found[1].1, b"\x0a\x07\x12\x05\x0a\x03hi\n");
    assert_eq!(found[2].1[2], 0x1a);
    assert_eq!(found[3], (2, b"{}".to_vec()));
    let answer =
        daemon.call("POST /filesystem.Filesystem/Stat", &[("content-type", "application/proto")], b"\x0a\x04/tmp");
    assert_eq!(answer.status, 200);
    assert!(answer.body.windows(6).any(|window| window == b"\x1a\x04/tmp"));
    let missing =
        daemon.call("POST /filesystem.Filesystem/Stat", &[("content-type", "application/proto")], b"\x0a\x05/none");
    assert_eq!((missing.status, missing.code().as_str()), (404, "not_found"));
}

#[test]
fn what_is_not_spoken_is_said() {
    let daemon = Daemon::start();
    let stat = |headers: &[(&str, &str)]| daemon.call("POST /filesystem.Filesystem/Stat", headers, br#"{"path":"/"}"#);
    assert_eq!(stat(&[("content-type", "text/plain")]).status, 415);
    let zipped = stat(&[("content-type", "application/json"), ("content-encoding", "gzip")]);
    assert_eq!((zipped.status, zipped.code().as_str()), (501, "unimplemented"));
    let stream = daemon.call("POST /process.Process/Start", &[STREAM, ("connect-content-encoding", "gzip")], b"");
    assert_eq!((stream.status, &run_of(&stream.body).error["code"]), (200, &json!("unimplemented")));
    assert_eq!(daemon.post("/process.Process/Nothing", json!({})).code(), "unimplemented");
    assert_eq!(daemon.get("/process.Process/List").status, 405);
    let bad = daemon.call("POST /filesystem.Filesystem/Stat", &[("content-type", "application/json")], b"{");
    assert_eq!((bad.status, bad.code().as_str()), (400, "invalid_argument"));
    assert_eq!(daemon.get("/health").status, 204);
    assert!(daemon.get("/metrics").json()["mem_total"].as_u64().unwrap() > 0);
}

#[test]
fn directories_are_managed() {
    let daemon = Daemon::start();
    let call = |name: &str, body: Value| daemon.post(&format!("/filesystem.Filesystem/{name}"), body);
    let path = daemon.text("a/b");
    assert_eq!(call("MakeDir", json!({ "path": path })).json()["entry"]["type"], "FILE_TYPE_DIRECTORY");
    let again = call("MakeDir", json!({ "path": path }));
    assert_eq!((again.status, again.code().as_str()), (409, "already_exists"));
    assert_eq!(call("Move", json!({"source": path, "destination": daemon.text("c/d")})).json()["entry"]["name"], "d");
    assert_eq!(call("Move", json!({"source": path, "destination": daemon.text("x/y")})).status, 404);
    assert!(!daemon.path("x").exists());
    std::os::unix::fs::symlink("d", daemon.path("c/link")).unwrap();
    let list = call("ListDir", json!({"path": daemon.text("c"), "depth": 2})).json();
    let link = list["entries"].as_array().unwrap().iter().find(|entry| entry["name"] == "link").unwrap().clone();
    assert_eq!((&link["type"], &link["symlinkTarget"]), (&json!("FILE_TYPE_DIRECTORY"), &json!(daemon.text("c/d"))));
    assert_eq!(call("ListDir", json!({"path": daemon.text("none")})).status, 404);
    assert_eq!(call("ListDir", json!({"path": daemon.text("config.json")})).status, 400);
    assert_eq!(call("Remove", json!({"path": daemon.text("c")})).status, 200);
    assert_eq!(call("Remove", json!({"path": daemon.text("c")})).status, 200);
    assert_eq!(call("Stat", json!({"path": daemon.text("c")})).code(), "not_found");
}

fn upload(daemon: &Daemon, path: &str, data: &[u8], headers: &[(&str, &str)]) -> wire::Response {
    let headers: Vec<_> = [("content-type", "application/octet-stream")].iter().chain(headers).copied().collect();
    daemon.call(&format!("POST /files?path={}", escape(path.as_bytes())), &headers, data)
}

#[test]
fn watchers_tell_of_writes_as_writes() {
    let daemon = Daemon::start();
    std::fs::create_dir_all(daemon.path("w/sub")).unwrap();
    let create = |recursive| {
        let body = json!({"path": daemon.text("w"), "recursive": recursive, "includeEntry": true});
        daemon.json("/filesystem.Filesystem/CreateWatcher", body)["watcherId"].clone()
    };
    let events = |id: &Value| {
        let events = daemon.json("/filesystem.Filesystem/GetWatcherEvents", json!({"watcherId": id}))["events"].clone();
        let shown = |event: &Value| {
            format!(
                "{} {}",
                event["type"].as_str().unwrap().trim_start_matches("EVENT_TYPE_"),
                event["name"].as_str().unwrap()
            )
        };
        (events.as_array().unwrap().iter().map(shown).collect::<Vec<_>>(), events)
    };
    let (flat, deep) = (create(false), create(true));
    assert_eq!(upload(&daemon, &daemon.text("w/f"), b"x", &[]).status, 200);
    let (shown, full) = events(&flat);
    assert_eq!(shown, ["CREATE f", "CHMOD f", "WRITE f"]);
    assert_eq!(full[2]["entry"]["path"], daemon.text("w/f"));
    assert_eq!(upload(&daemon, &daemon.text("w/f"), b"y", &[]).status, 200);
    assert_eq!(events(&flat).0, ["WRITE f"]);
    events(&deep);
    assert_eq!(upload(&daemon, &daemon.text("w/new/deep/f"), b"x", &[]).status, 200);
    assert_eq!(upload(&daemon, &daemon.text("w/sub/g"), b"x", &[]).status, 200);
    let (shown, _) = events(&deep);
    for wanted in ["CREATE new", "CREATE new/deep", "CREATE new/deep/f", "WRITE new/deep/f", "WRITE sub/g"] {
        assert!(shown.contains(&wanted.to_owned()), "{wanted}: {shown:?}");
    }
    std::fs::remove_dir_all(daemon.path("w/new")).unwrap();
    assert!(events(&deep).0.contains(&"REMOVE new".to_owned()));
    daemon.json("/filesystem.Filesystem/RemoveWatcher", json!({"watcherId": flat}));
    let gone = daemon.post("/filesystem.Filesystem/GetWatcherEvents", json!({"watcherId": flat}));
    assert_eq!(gone.code(), "not_found");
    let file = daemon.post("/filesystem.Filesystem/CreateWatcher", json!({"path": daemon.text("w/f")}));
    assert_eq!(file.code(), "invalid_argument");
    // As a stream, too.
    let body = envelope(json!({"path": daemon.text("w")}).to_string().as_bytes());
    let mut stream = daemon.open("POST /filesystem.Filesystem/WatchDir", &[STREAM], Some(&body));
    let mut seen = String::new();
    let read_until = |stream: &mut TcpStream, seen: &mut String, wanted: &str| {
        while !seen.contains(wanted) {
            let mut some = [0; 512];
            let count = stream.read(&mut some).unwrap();
            assert!(count > 0, "{seen}");
            seen.push_str(&String::from_utf8_lossy(&some[..count]));
        }
    };
    read_until(&mut stream, &mut seen, r#"{"start":{}}"#);
    std::fs::remove_file(daemon.path("w/f")).unwrap();
    read_until(&mut stream, &mut seen, r#"{"filesystem":{"name":"f","type":"EVENT_TYPE_REMOVE"}}"#);
}

#[test]
fn files_go_up_in_every_way_and_down() {
    let daemon = Daemon::start();
    let path = daemon.text("up/f");
    let written = upload(&daemon, &path, b"hello", &[("x-metadata-author", "mish")]).json();
    assert_eq!(written, json!([{"path": path, "name": "f", "type": "file", "metadata": {"author": "mish"}}]));
    let mut zipped = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    zipped.write_all(b"unpacked").unwrap();
    let zipped = zipped.finish().unwrap();
    assert_eq!(upload(&daemon, &path, &zipped, &[("content-encoding", "gzip")]).status, 200);
    assert_eq!(std::fs::read(daemon.path("up/f")).unwrap(), b"unpacked");
    let cut = upload(&daemon, &path, &zipped[..zipped.len() - 9], &[("content-encoding", "gzip")]);
    assert_eq!(cut.status, 400);
    assert_eq!(std::fs::read_dir(daemon.path("up")).unwrap().count(), 1);
    assert_eq!(upload(&daemon, &path, b"", &[("content-encoding", "br")]).status, 400);
    let (one, two) = (daemon.text("m/one"), daemon.text("m/two"));
    let part = |name: &str, data: &str| {
        format!("--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n{data}\r\n")
    };
    let body = format!("{}{}--B--\r\n", part(&one, "1\r\n--"), part(&two, ""));
    let multipart = [("content-type", "multipart/form-data; boundary=B")];
    let written = daemon.call("POST /files", &multipart, body.as_bytes());
    assert_eq!(written.json().as_array().unwrap().len(), 2, "{}", written.text());
    assert_eq!(std::fs::read(&one).unwrap(), b"1\r\n--");
    let twice = format!("{}{}--B--\r\n", part(&one, "first"), part(&one, "second"));
    assert_eq!(daemon.call("POST /files", &multipart, twice.as_bytes()).status, 400);
    let url = format!("/files?path={}", escape(daemon.path("up/f").as_os_str().as_bytes()));
    let down = daemon.get(&url);
    assert_eq!((down.status, down.text().as_str()), (200, "unpacked"));
    let part = read_response(daemon.open(&format!("GET {url}"), &[("range", "bytes=2-4")], None));
    assert_eq!((part.status, part.text().as_str()), (206, "pac"));
    assert!(part.headers.contains("content-range: bytes 2-4/8"));
    assert_eq!(read_response(daemon.open(&format!("GET {url}"), &[("range", "bytes=99-")], None)).status, 416);
    let refused = read_response(daemon.open(&format!("GET {url}"), &[("accept-encoding", "gzip, identity;q=0")], None));
    assert_eq!(refused.status, 406);
    let composed =
        daemon.json("/files/compose", json!({"source_paths": [one, path], "destination": daemon.text("whole")}));
    assert_eq!(composed["name"], "whole");
    assert_eq!(
        std::fs::read(daemon.path("whole")).unwrap(),
        b"first".iter().chain(b"unpacked").copied().collect::<Vec<_>>()
    );
    assert!(!daemon.path("up/f").exists());
    assert_eq!(daemon.get("/files?path=/none").json()["code"], 404);
    assert_eq!(daemon.get("/files?path=/etc/hostname&username=nobody-here").status, 401);
    assert_eq!(daemon.get("/files?path=/tmp").status, 400);
}
