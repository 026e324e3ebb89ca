//! `exec`: the case book's Exec and Identity parts, and the pains 1, 2, 9 to 12.

mod handed;

use std::time::{Duration, Instant};

use base64::{engine::general_purpose::STANDARD, Engine as _};
use handed::{each, eventually, one, send_request, Daemon};
use serde_json::json;

#[test]
fn output_is_the_process_s_byte_for_byte() {
    let daemon = one(json!({}));
    assert_eq!(daemon.shell("printf hello").stdout, b"hello");
    assert_eq!(daemon.shell(r"printf 'a\r\nb'").stdout, b"a\r\nb");
    assert_eq!(daemon.shell(r"printf '1\0002'").stdout, b"1\x002");
    assert_eq!(daemon.shell(r"printf '\377\376'").stdout, b"\xff\xfe");
    let ran = daemon.shell("printf 'runuser: user q does not exist' >&2; exit 3");
    assert_eq!((ran.code(), ran.reason(), ran.err().as_str()), (Some(3), "exited", "runuser: user q does not exist"));
    assert!(ran.stdout.is_empty());
}

#[test]
fn exit_codes_and_signals_are_told_apart() {
    let daemon = one(json!({}));
    for code in [0, 1, 200, 255] {
        let ran = daemon.shell(&format!("exit {code}"));
        assert_eq!((ran.code(), ran.signal(), ran.reason()), (Some(code), None, "exited"));
    }
    for signal in [9, 11, 15, 13] {
        let ran = daemon.shell(&format!("kill -{signal} $$"));
        assert_eq!((ran.code(), ran.signal(), ran.reason()), (None, Some(signal), "signaled"));
    }
}

#[test]
fn a_missing_directory_is_an_error_and_nothing_runs() {
    let daemon = one(json!({}));
    let marker = std::env::temp_dir().join(format!("sandboxd-must-not-be-{}", std::process::id()));
    let line = format!("true; touch {}", marker.display());
    let (status, error) = daemon.call("POST", "exec", json!({ "shell": line, "cwd": "/nope" }));
    assert_eq!((status, error["code"].as_str()), (400, Some("cwd_not_found")));
    assert!(error["message"].as_str().unwrap().contains("/nope"));
    assert!(!marker.exists());
    assert_eq!(daemon.exec(json!({ "shell": "true & wait; pwd", "cwd": "/tmp" })).out(), "/tmp\n");
}

#[test]
fn what_cannot_run_has_its_code() {
    let daemon = one(json!({}));
    assert_eq!(daemon.refused(json!({ "argv": ["no-such-program"] })), "command_not_found");
    assert_eq!(daemon.refused(json!({ "argv": ["/etc/passwd"] })), "command_not_executable");
    assert_eq!(daemon.refused(json!({ "argv": ["true"], "user": "no-such-user" })), "user_not_found");
    assert_eq!(daemon.refused(json!({ "shell": "echo a\0b" })), "invalid_argument");
    assert_eq!(daemon.refused(json!({ "argv": [] })), "invalid_argument");
    assert_eq!(daemon.refused(json!({ "argv": ["true"], "shell": "true" })), "invalid_argument");
    assert_eq!(daemon.refused(json!({ "argv": ["true"], "timeout_s": -1 })), "invalid_argument");
    assert_eq!(daemon.refused(json!({ "argv": ["true"], "no_such_field": 1 })), "invalid_request");
    assert_eq!(daemon.refused(json!({ "argv": ["true", "a".repeat(3 << 20)] })), "arguments_too_long");
    assert_eq!(daemon.shell("echo fine").out(), "fine\n");
}

#[test]
fn timeouts_of_zero_are_none() {
    let daemon = one(json!({}));
    assert_eq!(daemon.exec(json!({ "shell": "sleep 0.2; echo ok", "timeout_s": 0 })).out(), "ok\n");
    assert_eq!(daemon.exec(json!({ "shell": "sleep 0.2; echo ok", "timeout_s": null })).out(), "ok\n");
}

#[test]
fn environments_are_exact() {
    let config = json!({ "image_env": { "A": "image", "B": "image" }, "env": { "B": "sandbox" } });
    let daemon = one(config);
    let value = "a\nb'\"$x`é";
    let ran = daemon.exec(json!({ "shell": "printf %s \"$V$A$B\"", "env": { "V": value } }));
    assert_eq!(ran.out(), format!("{value}imagesandbox"));
    let ran = daemon.exec(json!({ "argv": ["env"], "env": { "LONG": "x".repeat(100 << 10) } }));
    assert!(ran.out().contains(&"x".repeat(100 << 10)));
    let refused = daemon.refused(json!({ "argv": ["true"], "env": { "LONG": "x".repeat(200 << 10) } }));
    assert_eq!(refused, "arguments_too_long");
    assert_eq!(daemon.exec(json!({ "shell": "echo $HOME $USER; umask" })).out(), "/root root\n0022\n");
}

#[test]
fn stdin_is_given_whole_or_null() {
    let daemon = one(json!({}));
    let data: Vec<u8> = (0..2_000_000_u32).map(|n| n as u8).collect();
    let ran = daemon.exec(json!({ "argv": ["cat"], "stdin": STANDARD.encode(&data) }));
    assert!(ran.stdout == data, "{} bytes", ran.stdout.len());
    assert_eq!(daemon.shell("cat; readlink /proc/self/fd/0").out(), "/dev/null\n");
    // One that doesn't read its input is no error.
    assert_eq!(daemon.exec(json!({ "argv": ["true"], "stdin": STANDARD.encode(&data) })).code(), Some(0));
}

#[test]
fn big_output_is_kept_to_its_limit_and_the_cut_is_said() {
    let daemon = one(json!({}));
    let ran = daemon.exec(json!({ "shell": "seq 100000; seq 100000 >&2" }));
    assert_eq!((ran.stdout.len(), ran.stderr.len()), (588_895, 588_895));
    assert!(ran.raw["stdout_cut"].is_null());
    let ran = daemon.exec(json!({ "shell": "seq 100000", "output_limit_bytes": 1000 }));
    assert_eq!(ran.raw["stdout_cut"], json!([500, 587_895]));
    assert!(ran.out().starts_with("1\n2\n") && ran.out().ends_with("99999\n100000\n"));
    assert_eq!(ran.stdout.len(), 1000);
}

#[test]
fn a_background_child_that_holds_the_pipe_delays_nothing_and_lives_on() {
    each(|daemon| {
        let start = Instant::now();
        let ran = daemon.shell("sleep 3171 & echo started");
        assert!(start.elapsed() < Duration::from_secs(1));
        assert_eq!(ran.out(), "started\n");
        assert!(daemon.runs("sleep 3171"));
        // It still can write: neither a full pipe nor SIGPIPE ends it.
        let file = std::env::temp_dir().join(format!("sandboxd-bg-{}", std::process::id()));
        let line = format!("(sleep 0.2; seq 100000; seq 100000 >&2; echo done > {}) & true", file.display());
        assert_eq!(daemon.shell(&line).code(), Some(0));
        eventually(|| std::fs::read(&file).is_ok_and(|text| text == b"done\n"), "the background process has written");
        std::fs::remove_file(file).unwrap();
        daemon.shell("pkill -f 'sleep 317[1]'");
        daemon.wait_gone("sleep 3171");
    });
}

#[test]
fn a_process_substitution_is_waited_for() {
    let daemon = one(json!({}));
    if std::path::Path::new("/bin/bash").exists() {
        assert_eq!(daemon.shell("echo hello > >(cat)").out(), "hello\n");
        assert_eq!(daemon.shell(r#"wc -l < <(printf "a\nb\n")"#).out(), "2\n");
    }
}

#[test]
fn a_timeout_ends_everything_and_gives_the_output_so_far() {
    each(|daemon| {
        let line = "echo before; setsid sleep 3281 & (sleep 3282 & sleep 3283 &) ; \
                    env -i setsid sh -c 'sleep 3284 & sleep 3285' & nohup sleep 3286 >/dev/null 2>&1 & \
                    trap '' TERM INT HUP; sleep 3287";
        let start = Instant::now();
        let ran = daemon.exec(json!({ "shell": line, "timeout_s": 0.5 }));
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert_eq!((ran.reason(), ran.code(), ran.out().as_str()), ("timeout", None, "before\n"));
        for seconds in 3281..3288 {
            assert!(!daemon.runs(&format!("sleep {seconds}")), "sleep {seconds} is left");
        }
        // The next calls are not touched by it.
        for _ in 0..10 {
            assert_eq!(daemon.shell("echo next").out(), "next\n");
        }
    });
}

#[test]
fn a_fork_storm_is_ended() {
    each(|daemon| {
        let line = "f() { sleep 3391 & }; while :; do f; done";
        let body = json!({ "shell": format!("ulimit -u 400; {line}"), "timeout_s": 0.3 });
        let ran = daemon.exec(body);
        assert_eq!(ran.reason(), "timeout");
        daemon.wait_gone("sleep 3391");
    });
}

#[test]
fn a_client_that_leaves_ends_its_exec() {
    each(|daemon| {
        let mut stream = daemon.connect();
        let body = json!({ "shell": "setsid sleep 3401 & sleep 3402" }).to_string();
        send_request(&mut stream, "POST", "exec", body.as_bytes());
        eventually(|| daemon.runs("sleep 3401") && daemon.runs("sleep 3402"), "both run");
        drop(stream);
        daemon.wait_gone("sleep 3401");
        daemon.wait_gone("sleep 3402");
    });
}

#[test]
fn exit_codes_are_never_stolen_and_orphans_are_reaped() {
    each(|daemon| {
        std::thread::scope(|scope| {
            for worker in 0..8 {
                scope.spawn(move || {
                    for round in 0..40 {
                        let code = (worker * 40 + round) % 200;
                        let ran = daemon.shell(&format!("(setsid true &) ; (sleep 0.01 &) ; exit {code}"));
                        assert_eq!(ran.code(), Some(code));
                    }
                });
            }
        });
        eventually(
            || daemon.shell("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l").out() == "0\n",
            "no zombies",
        );
    });
}

#[test]
fn std_streams_can_be_opened_again() {
    let daemon = one(json!({}));
    for user in ["root", "nobody", "12345:12345"] {
        let ran = daemon
            .exec(json!({ "shell": "echo x >/dev/stderr; echo y >/dev/stdout; cat /dev/stdin", "user": user,
            "stdin": STANDARD.encode("z"), "cwd": "/" }));
        assert_eq!((ran.out().as_str(), ran.err().as_str()), ("y\nz", "x\n"), "{user}");
        assert!(daemon
            .exec(json!({ "argv": ["readlink", "/proc/self/fd/1"], "user": user }))
            .out()
            .starts_with("pipe:"));
    }
}

#[test]
fn users_lose_every_capability_and_their_groups_are_the_image_s() {
    let daemon = one(json!({}));
    let status = daemon.exec(json!({ "argv": ["cat", "/proc/self/status"], "user": "12345:54321" })).out();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    assert_eq!(field("Uid:"), "12345\t12345\t12345\t12345");
    assert_eq!(field("Gid:"), "54321\t54321\t54321\t54321");
    assert_eq!(
        (field("Groups:"), field("CapEff:"), field("CapPrm:"), field("CapAmb:")),
        (String::new(), "0".repeat(16), "0".repeat(16), "0".repeat(16))
    );
    assert_eq!(field("CapBnd:"), "00000000a80425fb");
    assert_eq!(field("NoNewPrivs:"), "1");
    for name in ["SigBlk:", "SigIgn:", "SigCgt:"] {
        assert_eq!(field(name), "0".repeat(16), "{name}");
    }
    assert_eq!(daemon.exec(json!({ "shell": "id -u; echo $HOME", "user": "12345" })).out(), "12345\n/\n");
}

#[test]
fn clone3_is_not_there_for_the_sandbox() {
    let daemon = one(json!({}));
    let python =
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.syscall(435, 0, 0), ctypes.get_errno())";
    if std::path::Path::new("/usr/bin/python3").exists() {
        assert_eq!(daemon.exec(json!({ "argv": ["/usr/bin/python3", "-c", python] })).out(), "-1 38\n");
        let threads = "import threading; t = threading.Thread(target=print, args=('ok',)); t.start(); t.join()";
        assert_eq!(daemon.exec(json!({ "argv": ["/usr/bin/python3", "-c", threads] })).out(), "ok\n");
    }
}

#[test]
fn the_daemon_cannot_be_read_or_traced() {
    let daemon = one(json!({}));
    let ran = daemon.shell("cat /proc/$PPID/environ; ls -l /proc/$PPID/exe; kill -9 1; echo alive");
    assert!(ran.out().ends_with("alive\n"), "{ran:?}");
    assert_eq!(daemon.shell("echo still").out(), "still\n");
}

#[test]
fn no_descriptor_of_the_daemon_reaches_a_child() {
    let daemon = one(json!({}));
    let _open: Vec<_> = (0..5).map(|_| daemon.connect()).collect();
    let ran = daemon.exec(json!({ "argv": ["ls", "/proc/self/fd"] }));
    assert_eq!(ran.out(), "0\n1\n2\n3\n");
}

#[test]
fn the_working_directory_defaults_to_the_sandbox_s_then_the_user_s_home() {
    let directory = std::env::temp_dir().join(format!("sandboxd-new-{}/deep", std::process::id()));
    let daemon = one(json!({ "workdir": directory }));
    assert_eq!(daemon.exec(json!({ "argv": ["pwd"] })).out().trim(), directory.to_str().unwrap());
    std::fs::remove_dir_all(directory.parent().unwrap()).unwrap();
    let daemon = one(json!({}));
    assert_eq!(daemon.exec(json!({ "argv": ["pwd"] })).out(), "/root\n");
    assert_eq!(daemon.exec(json!({ "argv": ["pwd"], "user": "12345" })).out(), "/\n");
}

#[test]
fn messagepack_is_the_default() {
    let daemon = one(json!({}));
    let mut stream = daemon.connect();
    use std::io::Write as _;
    let body = rmp_serde::to_vec_named(&json!({ "argv": ["echo", "hi"] })).unwrap();
    let head = format!("POST /sandmill/v1/exec HTTP/1.1\r\nhost: s\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), &body].concat()).unwrap();
    let (status, answer) = handed::read_reply(&stream);
    assert_eq!(status, 200);
    let needle = b"\xa6stdout\xc4\x03hi\n";
    assert!(answer.windows(needle.len()).any(|window| window == needle));
}

#[test]
fn a_daemon_started_with_ignored_signals_gives_children_defaults() {
    use handed::{Groups, Place};
    let ignoring = |command: &mut std::process::Command| {
        let program = command.get_program().to_owned();
        let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        *command = std::process::Command::new("sh");
        command.args(["-c", "trap '' INT QUIT PIPE TSTP; exec \"$0\" \"$@\""]).arg(program).args(arguments);
        command.stdin(std::process::Stdio::null());
    };
    let daemon = Daemon::start_with(Groups::Marker, Place::Child, json!({}), ignoring);
    let status = daemon.exec(json!({ "argv": ["cat", "/proc/self/status"] })).out();
    assert!(status.contains("SigIgn:\t0000000000000000"), "{status}");
}
