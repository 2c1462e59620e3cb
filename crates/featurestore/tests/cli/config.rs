//! Settings as people give them: flags, environment, files.

use std::io::Write;

use crate::common::{Process, STEP, featurestore, run};

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(text.as_bytes()).expect("a writable file");
    file
}

fn show(text: &str, environment: &[(&str, &str)]) -> (bool, String, String) {
    let file = file(text);
    let path = file.path().to_str().expect("UTF-8").to_owned();
    let mut command = featurestore(&["config", "show", "--config", &path]);
    command.envs(environment.iter().copied());
    let ended = Process::start(command).end(STEP);
    (ended.status.success(), ended.stdout, ended.stderr)
}

fn line<'a>(text: &'a str, setting: &str) -> &'a str {
    text.lines()
        .find(|line| line.split_whitespace().next() == Some(setting))
        .unwrap_or_else(|| panic!("{setting} in {text}"))
}

#[test]
fn every_value_is_shown_with_its_source() {
    let text = "transport = \"tcp\"\nlease = \"5s\"\n";
    let (ok, shown, errors) = show(text, &[("FEATURESTORE_LEASE", "7s")]);
    assert!(ok, "{errors}");
    for (setting, parts) in [
        ("transport", &["tcp", "file"][..]),
        ("lease", &["7s", "FEATURESTORE_LEASE"]),
        ("deadline", &["30s", "default"]),
        ("arena", &["-", "default"]),
    ] {
        for part in parts {
            assert!(line(&shown, setting).contains(part), "{part}: {}", line(&shown, setting));
        }
    }
}

#[test]
fn columns_stand_below_each_other_and_a_reader_that_leaves_is_no_error() {
    let (_, shown, _) =
        show("lease = \"5s\"\n", &[("FEATURESTORE_MOONCAKE_METADATA", "http://h:1/m")]);
    let help = line(&shown, "strict").find("whether").expect("its meaning");
    for (setting, meaning) in [("lease", "how long"), ("mooncake_metadata", "address of")] {
        assert_eq!(line(&shown, setting).find(meaning), Some(help), "{shown}");
    }
    let mut command = featurestore(&["config", "show"]);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let ended = command.stdout(writer).output().expect("it starts");
    assert_eq!(ended.status.code(), Some(141), "{ended:?}");
    assert!(ended.stderr.is_empty(), "{ended:?}");
}

#[test]
fn the_same_settings_are_read_from_yaml() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let shown = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("room");
        run(&["config", "show", "--config", path.to_str().expect("UTF-8")])
    };
    let toml = shown("a.toml", "transport = \"tcp\"\nstrict = true\nmax_in_flight = 7\n");
    assert!(toml.status.success(), "{}", toml.stderr);
    for name in ["a.yaml", "a.YML"] {
        let yaml =
            shown(name, "# as others write it\ntransport: tcp\nstrict: true\nmax_in_flight: 7\n");
        assert!(yaml.status.success(), "{}", yaml.stderr);
        assert_eq!(yaml.stdout, toml.stdout);
    }
    let allowed = shown("b.yaml", "allow: [10.0.0.0/8, 127.0.0.0/8]\n");
    assert!(
        line(&allowed.stdout, "allow").contains("10.0.0.0/8,127.0.0.0/8"),
        "{}",
        allowed.stdout
    );
    for (text, why) in [
        ("transprt: tcp\n", "transport"),
        ("lease: {seconds: 5}\n", "wrong type"),
        ("lease: 5s\nlease: 6s\n", "lease"),
        ("transport = \"tcp\"\n", "yaml"),
    ] {
        let ended = shown("wrong.yaml", text);
        assert_eq!(ended.status.code(), Some(1), "{text}: {}", ended.stdout);
        assert!(
            ended.stderr.contains(why) && ended.stderr.contains("wrong.yaml"),
            "{}",
            ended.stderr
        );
    }
}

#[test]
fn a_misspelt_key_names_the_nearest() {
    let (ok, _, error) = show("lese = \"5s\"\n", &[]);
    assert!(!ok);
    assert!(error.contains("lese") && error.contains("did you mean lease"), "{error}");
    let (ok, _, error) = show("lease = \"5s\"\nlease = \"6s\"\n", &[]);
    assert!(!ok && error.contains("duplicate"), "{error}");
}

#[test]
fn a_secret_is_never_shown() {
    let (ok, shown, errors) = show("token = \"hush-hush-hush\"\n", &[]);
    assert!(ok, "{errors}");
    assert!(line(&shown, "token").contains("(set)"), "{shown}");
    assert!(!shown.contains("hush") && !errors.contains("hush"));
}

#[test]
fn a_bad_value_is_found_before_anything_starts() {
    for (text, part) in [
        ("arena = \"1.5e9\"", "arena"),
        ("arena = -5", "arena"),
        ("arena = \"0x10\"", "arena"),
        ("http = \"::1\"", "http"),
        ("control = \"127.0.0.1:123456\"", "control"),
        ("advertise = \"2001:db8::zz\"", "advertise"),
        ("allow = \"10.0.0.0/99\"", "allow"),
        ("transport = \"rmda\"", "transport"),
        ("receive = \"cuda\"", "known: auto, host, device"),
        ("transport = \"shm\"\nreceive = \"device\"", "choose the transport tcp"),
        ("transport = \"nvlink\"\nreceive = \"host\"", "setting=receive"),
    ] {
        let (ok, _, error) = show(text, &[]);
        assert!(!ok, "{text}");
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn an_arena_that_its_transport_cannot_read_is_found_before_anything_starts() {
    let (ok, _, error) = show("transport = \"shm\"\narena_kind = \"heap\"\n", &[]);
    assert!(!ok && error.contains("arena_kind") && error.contains("transport=shm"), "{error}");
}

#[test]
fn a_tap_is_named_once() {
    for command in ["pipeline", "capture-server"] {
        let ended = run(&[command, "--arena", "16MiB", "--taps", "1,2,1"]);
        assert_eq!(ended.status.code(), Some(1), "{command}: {ended:?}");
        assert!(ended.stderr.contains("a tap is named twice"), "{}", ended.stderr);
    }
}

#[test]
fn a_file_that_is_no_text_or_never_ends_is_a_wrong_configuration() {
    let mut binary = tempfile::NamedTempFile::new().expect("a temporary file");
    binary.write_all(b"lease = \"\xff\xfe\"\n").expect("a writable file");
    let path = binary.path().to_str().expect("UTF-8");
    for (path, part) in [(path, "at_byte=9"), ("/dev/zero", "max_bytes")] {
        for arguments in [
            &["config", "show", "--config", path][..],
            &["pipeline", "--config", path],
            &["config", "check", path],
            &["plan", path],
        ] {
            let ended = run(arguments);
            assert_eq!(ended.status.code(), Some(1), "{arguments:?}: {ended:?}");
            for part in [part, path, "read configuration"] {
                assert!(ended.stderr.contains(part), "{arguments:?}: {}", ended.stderr);
            }
        }
    }
}

/// Before anything is started, wherever it is written.
#[test]
fn a_protocol_that_mooncake_has_not_is_refused_with_those_that_it_has() {
    let written = file("mooncake_protocol = \"rmda\"\n");
    let path = written.path().to_str().expect("UTF-8");
    let put = ["rollout", "put", "--payload", "text:1MiB"];
    for (arguments, variable) in [
        (&["pipeline", "--samples", "1", "--mooncake-protocol", "rmda"][..], None),
        (&["capture-server", "--arena", "1MiB", "--config", path], None),
        (&["config", "show"], Some("FEATURESTORE_MOONCAKE_PROTOCOL")),
        (&put, Some("MOONCAKE_PROTOCOL")),
        (&put, Some("MC_PROTOCOL")),
    ] {
        let mut command = featurestore(arguments);
        command.envs(variable.map(|name| (name, "rmda")));
        let ended = Process::start(command).end(STEP);
        assert!(!ended.status.success(), "{arguments:?}: {ended:?}");
        let known = "did you mean rdma? known: tcp, rdma, nvlink, nvlink_intra";
        for part in ["mooncake_protocol", known, variable.unwrap_or_default()] {
            assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
        }
    }
}

#[test]
fn rollouts_are_not_received_on_a_device() {
    let mut command = featurestore(&["rollout", "put", "--payload", "text:1MiB", "--memory=8MiB"]);
    command.env("FEATURESTORE_RECEIVE", "device").env("FEATURESTORE_TRANSPORT", "tcp");
    let ended = Process::start(command).end(STEP);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    for part in ["rollouts are read in host memory only", "setting=receive"] {
        assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
    }
}

#[test]
fn a_misspelt_variable_is_refused_with_the_nearest_name() {
    let (ok, _, error) = show("", &[("FEATURESTORE_LEESE", "5s")]);
    assert!(!ok);
    assert!(error.contains("FEATURESTORE_LEESE") && error.contains("did you mean"), "{error}");
    assert!(error.contains("FEATURESTORE_LEASE?"), "{error}");
    let mut command = featurestore(&["capture-server", "--arena", "1MiB"]);
    command.env("FEATURESTORE_TOKN", "hush-hush");
    let ended = Process::start(command).end(STEP);
    assert!(!ended.status.success(), "it does not run without the token that was meant");
    assert!(ended.stderr.contains("did you mean FEATURESTORE_TOKEN?"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("hush"), "{}", ended.stderr);
}

#[test]
fn help_and_config_show_say_the_same() {
    let (ok, shown, errors) = show("", &[]);
    assert!(ok, "{errors}");
    let help = run(&["capture-server", "--help"]).stdout;
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    for line in shown.lines() {
        let mut parts = line.split_whitespace();
        let (name, default) = (parts.next().expect("a name"), parts.next().expect("a value"));
        if ["strict", "receive"].contains(&name) {
            continue; // a trainer's
        }
        let meaning = line.rsplit("  ").next().expect("a column").trim();
        let meaning = &meaning[1..]; // help begins sentences
        let flag = format!("--{}", name.replace('_', "-"));
        if name == "token" {
            assert!(help.contains("FEATURESTORE_TOKEN") && words(&help).contains(meaning));
            continue;
        }
        let after = |end| help.split(&format!("{flag}{end}")).nth(1); // a value, or perhaps one
        let told = after(" <").or(after("[=")).unwrap_or_else(|| panic!("{flag} in {help}"));
        let told = words(told.split(" --").next().expect("its text"));
        assert!(told.contains(meaning), "{flag}: {meaning} in {told}");
        assert_eq!(told.contains(&format!("[default: {default}]")), default != "-", "{told}");
    }
    let help = run(&["plan", "--help"]).stdout;
    for part in ["backend = \"tcp\"", "protocol = \"nvlink_intra\"", "config schema"] {
        assert!(help.contains(part), "{part}: {help}");
    }
    let help = run(&["pipeline", "--help"]).stdout;
    for part in [
        "if not given, 2GiB in a trainer",
        "[default: 2GiB]",
        "[default: auto]",
        "FEATURESTORE_TOKEN",
    ] {
        assert!(help.contains(part), "{part}: {help}");
    }
}

#[test]
fn names_of_transports_are_forgiving() {
    for name in ["SHM", " shm ", "Shm"] {
        let ended = run(&[
            "pipeline",
            "--samples",
            "1",
            "--hidden",
            "8",
            "--taps",
            "1",
            "--servers",
            "1",
            "--arena",
            "4MiB",
            "--quantum",
            "1",
            "--max-length",
            "8",
            "--transport",
            name,
        ]);
        assert!(ended.status.success(), "{name:?}: {}", ended.stderr);
    }
    let ended = run(&["pipeline", "--transport", "shn"]);
    assert_eq!(ended.status.code(), Some(2));
    assert!(ended.stderr.contains("did you mean shm"), "{}", ended.stderr);
}

#[test]
fn help_shows_every_command_with_examples() {
    let ended = run(&["--help"]);
    assert!(ended.status.success());
    for part in ["pipeline", "capture-server", "doctor", "config", "Examples", "Exit codes"] {
        assert!(ended.stdout.contains(part), "{part} in {}", ended.stdout);
    }
    assert!(!ended.stdout.contains("trainer;"), "internal commands stay hidden");
    for command in ["pipeline", "capture-server", "doctor", "config"] {
        assert!(run(&[command, "--help"]).status.success(), "{command:?}");
    }
    assert_eq!(run(&["pipelin"]).status.code(), Some(2));
}

/// What is shipped starts where nothing is: no variables, no folder of its own, nobody's libraries.
#[test]
fn f61_every_command_shows_its_help_in_a_clean_environment() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let clean = |arguments: &[&str]| {
        let mut command = featurestore(arguments);
        command.env_clear().current_dir(folder.path());
        let ended = Process::start(command).end(STEP);
        assert!(ended.status.success(), "{arguments:?}: {ended:?}");
        assert_eq!(ended.stderr, "", "{arguments:?}");
        ended.stdout
    };
    let commands = |help: &str| -> Vec<String> {
        let list = help.split("Commands:\n").nth(1).unwrap_or_default();
        let lines = list.lines().take_while(|line| line.starts_with("  "));
        let name = |line: &str| line.split_whitespace().next().map(str::to_owned);
        lines.filter(|line| !line.starts_with("   ")).filter_map(name).collect()
    };
    assert!(clean(&["--version"]).starts_with("featurestore "));
    let first = commands(&clean(&["--help"]));
    assert!(first.len() > 4, "{first:?}");
    for command in first.iter().filter(|name| *name != "help") {
        for second in commands(&clean(&[command, "--help"])).iter().filter(|name| *name != "help") {
            clean(&[command, second, "--help"]);
        }
    }
}

#[test]
fn every_flag_of_the_readme_exists() {
    let mut known =
        String::from("--release --open --no-deps --quick --features --test --gpu --only\n");
    for command in ["pipeline", "capture-server", "doctor"] {
        known += &run(&[command, "--help"]).stdout;
    }
    for command in ["put", "get", "inspect", "cleanup", "sweep", "bench"] {
        known += &run(&["rollout", command, "--help"]).stdout;
    }
    let readme = include_str!("../../../../README.md");
    let flags = readme.split(|c: char| !(c == '-' || c.is_ascii_alphanumeric()));
    let flags = flags
        .filter(|word| word.starts_with("--") && word.len() > 3 && !word[2..].starts_with('-'));
    for flag in flags {
        assert!(known.split(['[', ' ', '\n']).any(|word| word == flag), "{flag}");
    }
}

/// Numbers of a run file that no machine has room for are refused or reckoned with, never a panic.
#[test]
fn numbers_beyond_everything_are_no_panic() {
    const RUN: &str = "[run]\nid = \"a\"\nstrategy = \"dflash\"\nhidden = 5120\nlayers = [5, 19]\n\
        max_length = 8192\nmodel = \"m\"\ncontrol_dir = \"/tmp/a\"\n[transport]\nbackend = \"tcp\"\n\
        arena = \"32GiB\"\n[[server]]\nhost = \"127.0.0.1\"\nport = 30000\n[trainer]\nbatch = 4\n\
        command = [\"x\"]\n";
    for setting in ["hidden = 5120", "max_length = 8192", "batch = 4"] {
        let (name, _) = setting.split_once(" = ").expect("a setting");
        let file = file(&RUN.replace(setting, &format!("{name} = {}", i64::MAX)));
        let path = file.path().to_str().expect("UTF-8");
        for command in [&["config", "check"][..], &["plan"], &["config", "explain"]] {
            let ended = run(&[command, &[path]].concat());
            assert!(!ended.stderr.contains("panicked"), "{command:?} {name}: {}", ended.stderr);
        }
    }
}
