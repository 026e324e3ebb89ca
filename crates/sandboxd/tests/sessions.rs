//! Sessions, in every shell that this machine has.

mod handed;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use handed::{each, eventually, one, send_request, Daemon, Ran};
use serde_json::{json, Value};

struct Session<'a> {
    daemon: &'a Daemon,
    id: String,
}

impl<'a> Session<'a> {
    fn new(daemon: &'a Daemon, body: Value) -> Self {
        let (status, made) = daemon.call("POST", "sessions", body);
        assert_eq!(status, 200, "{made}");
        Self { daemon, id: made["session_id"].as_str().unwrap().to_owned() }
    }

    fn try_run(&self, body: Value) -> (u16, Value) {
        self.daemon.call("POST", &format!("sessions/{}/run", self.id), body)
    }

    fn run(&self, command: &str) -> Ran {
        let (status, answer) = self.try_run(json!({ "command": command, "timeout_s": 20 }));
        assert_eq!(status, 200, "{answer}");
        Ran::new(answer)
    }

    fn out(&self, command: &str) -> String {
        self.run(command).out()
    }
}

fn alive(ran: &Ran) -> bool {
    ran.raw["session_alive"].as_bool().unwrap()
}

/// Paths of the shells here; busybox is given the name that makes it ash.
fn shells(daemon: &Daemon) -> Vec<String> {
    let mut shells: Vec<String> = ["/bin/bash", "/bin/dash"]
        .iter()
        .filter(|path| Path::new(path).exists())
        .map(|path| (*path).to_owned())
        .collect();
    if Path::new("/usr/bin/busybox").exists() {
        let ash = daemon.directory.join("ash");
        std::os::unix::fs::symlink("/usr/bin/busybox", &ash).unwrap();
        shells.push(ash.to_str().unwrap().to_owned());
    }
    shells
}

fn each_shell(test: impl Fn(&Daemon, &str)) {
    let daemon = one(json!({}));
    for shell in shells(&daemon) {
        test(&daemon, &shell);
    }
}

#[test]
fn state_lasts_between_commands() {
    each_shell(|daemon, shell| {
        let session = Session::new(daemon, json!({ "shell": shell, "env": { "GIVEN": "g" } }));
        session.run("cd /tmp; export A=1; b=2; f() { echo \"f $1 $b\"; }; set -- x y");
        assert_eq!(session.out("pwd; f $A; echo $GIVEN $#; sh -c 'echo $A$b'"), "/tmp\nf 1 2\ng 2\n1\n");
        session.run("exec 4>/tmp/sandboxd-session-fd; echo kept >&4");
        assert_eq!(
            session.out("echo more >&4; exec 4>&-; cat /tmp/sandboxd-session-fd; rm /tmp/sandboxd-session-fd"),
            "kept\nmore\n"
        );
        session.run("sleep 3701 &");
        assert!(session.out("jobs").contains("Running"));
        session.run("kill $!");
    });
}

#[test]
fn the_output_is_the_command_s_alone() {
    each_shell(|daemon, shell| {
        let session = Session::new(daemon, json!({ "shell": shell }));
        for (command, output) in [
            ("echo hi", &b"hi\n"[..]),
            ("printf hello", b"hello"),
            (r"printf '1\0002\377'", b"1\x002\xff"),
            ("cat <<X\nhe\"r'e\n$((1+1))\nX\n", b"he\"r'e\n2\n"),
            ("cat <<'X'\n$a `b`\nX", b"$a `b`\n"),
            ("echo 'two\nlines' \\\n  \"joined\" # comment", b"two\nlines joined\n"),
            ("for i in 1 2; do\n  echo $i\n  break\ndone", b"1\n"),
            ("cat; read x; echo \"r$?\"", b"r1\n"),
            ("", b""),
        ] {
            let ran = session.run(command);
            assert!(ran.stdout == output && ran.stderr.is_empty() && alive(&ran), "{shell}: {command}: {ran:?}");
        }
        let ran = session.run("seq 300000; seq 300000 >&2");
        assert_eq!((ran.stdout.len(), ran.stderr.len()), (1_988_895, 1_988_895));
        assert_eq!(session.out(&format!("x='{}'; echo ${{#x}}", "a'\\''b".repeat(40_000))), "120000\n");
    });
}

#[test]
fn statuses_are_exact() {
    each_shell(|daemon, shell| {
        let session = Session::new(daemon, json!({ "shell": shell }));
        for (command, code) in [
            ("true", 0),
            ("false", 1),
            ("sh -c 'exit 200'", 200),
            ("no-such-command-here", 127),
            ("sh -c 'kill -9 $$'", 137),
        ] {
            assert_eq!(session.run(command).code(), Some(code), "{shell}: {command}");
        }
        session.run("(exit 7)");
        assert_eq!(session.out("echo $?"), "7\n");
        for broken in ["if", "echo 'unterminated", "(", "fi; done"] {
            let ran = session.run(broken);
            assert!(ran.code() == Some(2) || ran.code() == Some(1), "{shell}: {broken}: {ran:?}");
            assert!(alive(&ran) && !ran.stderr.is_empty());
        }
        assert_eq!(session.out("echo alive"), "alive\n");
    });
}

#[test]
fn an_end_of_the_shell_is_reported() {
    each_shell(|daemon, shell| {
        for (command, code, signal) in [
            ("exit 7", Some(7), None),
            ("exec true", Some(0), None),
            ("set -e; false; echo no", Some(1), None),
            ("kill -9 $$", None, Some(9)),
        ] {
            let session = Session::new(daemon, json!({ "shell": shell }));
            let ran = session.run(command);
            assert_eq!((ran.code(), ran.signal(), alive(&ran)), (code, signal, false), "{shell}: {command}: {ran:?}");
            assert!(ran.stdout.is_empty());
            let (status, error) = session.try_run(json!({ "command": "true" }));
            assert_eq!((status, error["code"].as_str()), (410, Some("session_ended")));
        }
        assert_eq!(Session::new(daemon, json!({ "shell": shell })).out("echo again"), "again\n");
    });
}

#[test]
fn a_timeout_ends_the_command_and_keeps_the_shell() {
    let marker = std::env::temp_dir().join(format!("sandboxd-session-after-{}", std::process::id()));
    each_shell(|daemon, shell| {
        let session = Session::new(daemon, json!({ "shell": shell }));
        session.run("sleep 3801 & job=$!; x=kept; g() { sleep 3802; touch \"$1\"; }; h() { g \"$1\"; touch \"$1\"; }");
        let after = marker.display();
        for command in [
            format!("echo before; sleep 3803; touch {after}"),
            format!("echo before; setsid sleep 3803 & h {after}; touch {after}"),
            format!("echo before; while :; do h {after}; done"),
            "echo before; while :; do :; done".to_owned(),
            format!("echo before; sleep 3803 | cat; touch {after}"),
        ] {
            let start = Instant::now();
            let (status, answer) = session.try_run(json!({ "command": command, "timeout_s": 0.2 }));
            assert_eq!(status, 200, "{answer}");
            let ran = Ran::new(answer);
            assert!(start.elapsed() < Duration::from_secs(2));
            assert_eq!(
                (ran.reason(), ran.code(), ran.out().as_str()),
                ("timeout", None, "before\n"),
                "{shell}: {command}"
            );
            assert!(alive(&ran), "{shell}: {command}");
            assert!(!daemon.runs("sleep 3802") && !daemon.runs("sleep 3803"), "{shell}: {command}");
            assert!(!marker.exists(), "{shell}: {command}: it went on after its timeout");
            assert_eq!(session.out("echo $x"), "kept\n");
            assert!(daemon.runs("sleep 3801"), "{shell}: an earlier job must live");
        }
        session.run("kill $job");
        daemon.wait_gone("sleep 3801");
    });
}

#[test]
fn a_shell_that_does_not_answer_ends_with_its_session() {
    each(|daemon| {
        let session = Session::new(daemon, json!({}));
        let (_, answer) = session.try_run(json!({ "command": "exec sleep 3901", "timeout_s": 0.2 }));
        let ran = Ran::new(answer);
        assert_eq!((ran.reason(), alive(&ran)), ("timeout", false));
        daemon.wait_gone("sleep 3901");
    });
}

#[test]
fn a_client_that_leaves_ends_its_command_only() {
    let daemon = one(json!({}));
    let session = Session::new(&daemon, json!({}));
    let mut stream = daemon.connect();
    let body = json!({ "command": "x=1; sleep 3951" }).to_string();
    send_request(&mut stream, "POST", &format!("sessions/{}/run", session.id), body.as_bytes());
    eventually(|| daemon.runs("sleep 3951"), "it sleeps");
    assert_eq!(session.try_run(json!({ "command": "true" })).1["code"], "session_busy");
    drop(stream);
    daemon.wait_gone("sleep 3951");
    eventually(|| session.try_run(json!({ "command": "true" })).0 == 200, "the session is free again");
    assert_eq!(session.out("echo $x"), "1\n");
}

#[test]
fn sessions_have_users_and_are_listed_and_deleted() {
    each(|daemon| {
        let session = Session::new(daemon, json!({ "user": "nobody", "cwd": "/" }));
        let ran = session.run("id -un; echo x >/dev/stderr; sleep 3961 &");
        assert_eq!((ran.out().as_str(), ran.err().as_str()), ("nobody\n", "x\n"));
        let (_, list) = daemon.call("GET", "sessions", Value::Null);
        assert_eq!(
            (&list["sessions"][0]["session_id"], &list["sessions"][0]["alive"]),
            (&json!(session.id), &json!(true))
        );
        assert_eq!(daemon.call("DELETE", &format!("sessions/{}", session.id), Value::Null).0, 200);
        assert!(!daemon.runs("sleep 3961"));
        assert_eq!(session.try_run(json!({ "command": "true" })).1["code"], "session_not_found");
        let (status, error) = daemon.call("POST", "sessions", json!({ "shell": "/bin/false" }));
        assert_eq!((status, error["code"].as_str()), (400, Some("shell_not_usable")));
    });
}
