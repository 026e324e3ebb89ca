//! Sandmill's file calls against the real daemon; the cases are those that went wrong elsewhere.

mod wire;

use std::{
    ffi::OsStr,
    io::Write as _,
    net::Shutdown,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{symlink, MetadataExt as _, PermissionsExt as _},
    },
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use serde_json::json;
use wire::{escape, eventually, read_response, Daemon};

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

fn put(daemon: &Daemon, path: &str, query: &str, data: &[u8]) -> wire::Response {
    daemon.call(&format!("PUT /sandmill/v1/files?path={}{query}", escape(path.as_bytes())), &JSON, data)
}

fn get(daemon: &Daemon, path: &[u8]) -> wire::Response {
    daemon.call(&format!("GET /sandmill/v1/files?path={}", escape(path)), &JSON, b"")
}

#[test]
fn what_a_write_makes_belongs_to_its_user() {
    let daemon = Daemon::start();
    std::fs::create_dir(daemon.path("home")).unwrap();
    std::os::unix::fs::chown(daemon.path("home"), Some(1000), Some(1000)).unwrap();
    std::fs::set_permissions(daemon.path(""), std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(put(&daemon, &daemon.text("home/n1/n2/f"), "&user=1000:1000", b"x").status, 201);
    let run = |argv: &[&str]| daemon.exec(argv, Some("1000:1000"))["exit_code"].clone();
    assert_eq!(run(&["chmod", "0600", &daemon.text("home/n1/n2/f")]), 0);
    assert_eq!(run(&["rm", "-r", &daemon.text("home/n1")]), 0);
    assert_eq!(daemon.path("").metadata().unwrap().uid(), 0);
}

#[test]
fn a_reader_never_sees_a_part_of_a_write() {
    let daemon = Daemon::start();
    let path = daemon.path("f");
    std::fs::write(&path, vec![b'A'; 4 << 20]).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o750)).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let data = std::fs::read(&path).unwrap();
                assert_eq!(data.len(), 4 << 20);
                assert!(data.iter().all(|byte| *byte == data[0]));
            }
        });
        for round in 0..50 {
            let data = vec![if round % 2 == 0 { b'B' } else { b'A' }; 4 << 20];
            assert_eq!(put(&daemon, path.to_str().unwrap(), "", &data).status, 201);
        }
        done.store(true, Ordering::Relaxed);
    });
    let metadata = path.metadata().unwrap();
    assert_eq!((metadata.mode() & 0o7777, metadata.uid()), (0o750, 0));
}

#[test]
fn a_tree_goes_up_and_comes_down_unchanged() {
    let daemon = Daemon::start();
    let tree = daemon.path("tree");
    std::fs::create_dir_all(tree.join("d")).unwrap();
    std::fs::write(tree.join("s.sh"), "#!/bin/sh\necho ran\n").unwrap();
    std::fs::set_permissions(tree.join("s.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    symlink("d", tree.join("dirlink")).unwrap();
    symlink("loop", tree.join("loop")).unwrap();
    symlink("nowhere", tree.join("dangling")).unwrap();
    let find = |path: &str| {
        let result =
            daemon.json("/sandmill/v1/exec", json!({"argv": ["find", ".", "-printf", "%y %m %l %p\n"], "cwd": path}));
        let mut lines: Vec<_> = decoded(&result["stdout"]).lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let down = daemon.get(&format!("/sandmill/v1/tar?path={}", escape(tree.as_os_str().as_bytes())));
    assert_eq!(down.status, 200);
    let copy = daemon.text("copy");
    let up = daemon.call(&format!("PUT /sandmill/v1/tar?path={}", escape(copy.as_bytes())), &JSON, &down.body);
    assert_eq!(up.status, 200, "{}", up.text());
    assert_eq!(up.json()["warnings"], json!([]));
    assert_eq!(find(&copy), find(tree.to_str().unwrap()));
    assert_eq!(decoded(&daemon.exec(&[&format!("{copy}/s.sh")], None)["stdout"]), "ran\n");
    let again = daemon.get(&format!("/sandmill/v1/tar?path={}", escape(copy.as_bytes())));
    assert_eq!(again.body.len(), down.body.len());
}

fn decoded(base64: &serde_json::Value) -> String {
    use base64::{engine::general_purpose::STANDARD, Engine as _};
    String::from_utf8(STANDARD.decode(base64.as_str().unwrap()).unwrap()).unwrap()
}

#[test]
fn pipes_and_devices_are_typed_errors_at_once() {
    let daemon = Daemon::start();
    assert_eq!(daemon.exec(&["mkfifo", &daemon.text("p")], None)["exit_code"], 0);
    let start = Instant::now();
    assert_eq!(get(&daemon, daemon.text("p").as_bytes()).code(), "not_a_regular_file");
    assert_eq!(put(&daemon, &daemon.text("p"), "", b"x").code(), "not_a_regular_file");
    assert_eq!(get(&daemon, b"/dev/zero").code(), "not_a_regular_file");
    assert!(start.elapsed() < Duration::from_secs(2));
    assert_eq!(daemon.fs(json!({"op": "stat", "path": daemon.text("p")}))["type"], "fifo");
    assert!(get(&daemon, b"/proc/version").text().starts_with("Linux"));
    assert!(get(&daemon, b"/proc/kallsyms").body.len() > 1 << 16);
    assert_eq!(get(&daemon, daemon.text("").as_bytes()).code(), "is_a_directory");
}

#[test]
fn every_name_is_listed_and_can_be_read() {
    let daemon = Daemon::start();
    std::fs::create_dir(daemon.path("d")).unwrap();
    let long = "l".repeat(255);
    let names: Vec<&[u8]> = vec![b"n ", b" l", b"x\ny", b"-rf", long.as_bytes(), b"\xff", b"a\\b", "\u{e9}".as_bytes()];
    for name in &names {
        std::fs::write(daemon.path("d").join(OsStr::from_bytes(name)), name).unwrap();
    }
    symlink("nowhere", daemon.path("d/dangling")).unwrap();
    symlink("d", daemon.path("link")).unwrap();
    let body = rmp_serde::to_vec_named(&json!({"op": "list", "path": daemon.text("link")})).unwrap();
    let listed = daemon.call("POST /sandmill/v1/fs", &[("content-type", "application/msgpack")], &body);
    assert_eq!(listed.status, 200);
    for name in &names {
        // The exact bytes, after a MessagePack header of a string or of binary data.
        assert!(listed.body.windows(name.len()).any(|window| window == *name), "{name:?}");
        let path = [daemon.text("link/").as_bytes(), name].concat();
        assert_eq!(&get(&daemon, &path).body, name);
    }
    let entries = daemon.fs(json!({"op": "list", "path": daemon.text("link")}))["entries"].as_array().unwrap().clone();
    assert_eq!(entries.len(), names.len() + 1);
    let odd = entries.iter().find(|entry| entry["name_base64"] == "/w==").unwrap();
    assert_eq!(odd["name"], "\\xff");
    let by_base64 = daemon.fs(json!({"op": "stat", "path": {"base64": odd["path_base64"]}}));
    assert_eq!(by_base64["size_bytes"], 1);
    assert!(entries.iter().any(|entry| entry["name"] == "dangling" && entry["target"] == "nowhere"));
    let missing = daemon.post("/sandmill/v1/fs", json!({"op": "list", "path": daemon.text("none")}));
    assert_eq!((missing.status, missing.code().as_str()), (404, "not_found"));
}

#[test]
fn a_client_that_leaves_leaves_nothing_behind() {
    let daemon = Daemon::start();
    std::fs::create_dir(daemon.path("d")).unwrap();
    let line = format!("PUT /sandmill/v1/files?path={}", escape(daemon.text("d/f").as_bytes()));
    let mut stream = daemon.open(&line, &[("content-length", "3000000")], None);
    stream.write_all(&vec![1; 2_000_000]).unwrap();
    let count = || std::fs::read_dir(daemon.path("d")).unwrap().count();
    eventually("the upload begins", || count() == 1);
    assert!(!daemon.path("d/f").exists());
    stream.shutdown(Shutdown::Both).unwrap();
    drop(stream);
    eventually("the temporary file goes", || count() == 0);
    // The same for a body that says that it is cut off.
    let mut stream = daemon.open(&line, &[("transfer-encoding", "chunked")], None);
    stream.write_all(b"5\r\nhello\r\nZZ\r\n").unwrap();
    assert!(read_response(stream).status >= 400);
    eventually("the temporary file goes", || count() == 0);
}

#[test]
fn large_files_take_little_memory() {
    const SIZE: usize = 300 << 20;
    let daemon = Daemon::start();
    let line = format!("PUT /sandmill/v1/files?path={}", escape(daemon.text("big").as_bytes()));
    let mut stream = daemon.open(&line, &[("content-length", &SIZE.to_string())], None);
    let block: Vec<u8> = (0..1 << 20).map(|index: u32| (index % 251) as u8).collect();
    for _ in 0..SIZE >> 20 {
        stream.write_all(&block).unwrap();
    }
    assert_eq!(read_response(stream).status, 201);
    let back = get(&daemon, daemon.text("big").as_bytes());
    assert!(back.headers.contains(&format!("content-length: {SIZE}")));
    assert_eq!(back.body.len(), SIZE);
    assert!(back.body.chunks(1 << 20).all(|chunk| chunk == block));
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak_kb: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak_kb < 32 << 10, "{peak_kb} kB");
}

#[test]
fn parts_of_a_file_can_be_read() {
    let daemon = Daemon::start();
    std::fs::write(daemon.path("f"), "0123456789").unwrap();
    let path = escape(daemon.text("f").as_bytes());
    assert_eq!(daemon.get(&format!("/sandmill/v1/files?path={path}&offset=3&length=4")).text(), "3456");
    assert_eq!(daemon.get(&format!("/sandmill/v1/files?path={path}&offset=50")).text(), "");
    let whole = daemon.get(&format!("/sandmill/v1/files?path={path}"));
    assert!(whole.headers.contains("\"size_bytes\":10"), "{}", whole.headers);
}

#[test]
fn a_hundred_thousand_files_go_while_other_calls_are_answered() {
    let memory = Path::new("/dev/shm");
    let daemon = if memory.is_dir() { Daemon::start_in(memory) } else { Daemon::start() };
    for directory in 0..10 {
        let directory = daemon.path("t").join(directory.to_string());
        std::fs::create_dir_all(&directory).unwrap();
        for file in 0..10_000 {
            std::fs::File::create(directory.join(file.to_string())).unwrap();
        }
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let answer = daemon.fs(json!({"op": "remove", "path": daemon.text("t")}));
            done.store(true, Ordering::Relaxed);
            assert_eq!(answer["removed"], 100_011);
        });
        while !done.load(Ordering::Relaxed) {
            let start = Instant::now();
            assert_eq!(daemon.get("/health").status, 204);
            assert!(start.elapsed() < Duration::from_secs(1));
        }
    });
    assert!(!daemon.path("t").exists());
}

#[test]
fn a_repository_that_is_uploaded_is_trusted_by_git() {
    let daemon = Daemon::start();
    let shell = |script: &str, user: Option<&str>| {
        daemon.json("/sandmill/v1/exec", json!({"shell": script, "user": user, "cwd": daemon.text("")}))
    };
    if shell("git init -q repo && touch repo/f", None)["exit_code"] != 0 {
        eprintln!("skipped: this machine has no git");
        return;
    }
    std::fs::set_permissions(daemon.path(""), std::fs::Permissions::from_mode(0o755)).unwrap();
    let archive = daemon.get(&format!("/sandmill/v1/tar?path={}", escape(daemon.text("repo").as_bytes()))).body;
    let line = format!("PUT /sandmill/v1/tar?path={}&user=1000:1000", escape(daemon.text("up").as_bytes()));
    assert_eq!(daemon.call(&line, &JSON, &archive).status, 200);
    let status = shell("git -C up status --short", Some("1000:1000"));
    assert_eq!((status["exit_code"].as_i64(), decoded(&status["stdout"]).as_str()), (Some(0), "?? f\n"), "{status}");
}
