use super::*;

const GOOD: &str = r#"
[run]
id = "run0"
strategy = "dspark"
hidden = 5120
layers = [5, 19, 33, 47, 61]
max_length = 8192
model = "some/model"
control_dir = "control"

[transport]
backend = "mooncake_gpu_direct"
protocol = "nvlink"
arena = "32GiB"
receive_buffers = "cuda"
force_mnnvl = true

[[server]]
host = "10.0.0.2"
port = 30000
control_port = 30001
gpus = [0, 1, 2, 3]

[[server]]
host = "10.0.0.2"
port = 31000
gpus = [4, 5, 6, 7]

[producer]
command = ["python", "train.py", "--role", "producer's own"]

[trainer]
ranks = 2
batch = 4
accumulation = 2
"#;

fn none(_: &str) -> Option<String> {
    None
}

fn load(text: &str) -> Result<Loaded> {
    Loaded::text(text, Syntax::Toml, none)
}

/// [`GOOD`] with capture servers of ours, read by shm.
fn over_shm() -> String {
    GOOD.replacen("mooncake_gpu_direct", "shm", 1)
        .replacen("protocol = \"nvlink\"\n", "", 1)
        .replacen("receive_buffers = \"cuda\"\n", "", 1)
        .replacen("force_mnnvl = true\n", "", 1)
}

#[test]
fn every_role_gets_its_command_and_environment() {
    let plan = load(GOOD).unwrap().plan();
    let names: Vec<_> = plan.roles.iter().map(|role| &*role.name).collect();
    assert_eq!(names, ["server-0", "server-1", "producer", "trainer-0", "trainer-1"]);
    let server = &plan.roles[0];
    let line = server.argv.join(" ");
    for part in [
        "--tp-size 4",
        "--chunked-prefill-size -1",
        "--context-length 8199",
        "--spec-capture-method dspark --spec-capture-aux-layer-ids 5 19 33 47 61",
    ] {
        assert!(line.contains(part), "{line}");
    }
    assert_eq!(server.env["SGLANG_SPEC_CAPTURE_ARENA_BYTES"], (32_u64 << 30).to_string());
    assert_eq!(server.env["MOONCAKE_PROTOCOL"], "nvlink");
    assert_eq!(server.env["MC_FORCE_MNNVL"], "1");
    assert_eq!(server.env["SGLANG_SPEC_CAPTURE_CONTROL_PORT"], "30001");
    assert_eq!(plan.roles[2].env["CUDA_VISIBLE_DEVICES"], "", "the producer has no device");
    assert_eq!(plan.roles[4].env["RANK"], "1");
    let shell = plan.render(Format::Shell);
    assert!(shell.contains("'producer'\\''s own'"), "{shell}");
    let json: serde_json::Value = serde_json::from_str(&plan.render(Format::Json)).unwrap();
    assert_eq!(json["roles"][0]["phase"], 1);
    assert!(plan.render(Format::Text).contains("server-1 on 10.0.0.2"));
}

#[test]
fn contradictions_are_refused_with_the_reason_and_all_at_once() {
    for (from, to, part) in [
        ("arena = \"32GiB\"\n", "", "SGLANG_SPEC_CAPTURE_ARENA_BYTES"),
        ("receive_buffers = \"cuda\"", "receive_buffers = \"pinned\"", "receive_buffers=cuda"),
        ("receive_buffers = \"cuda\"\n", "", "receive_buffers=cuda"),
        ("force_mnnvl = true", "gpu_put = false\nforce_mnnvl = true", "conflicts"),
        ("force_mnnvl = true", "", "MC_FORCE_MNNVL"),
        ("\"nvlink\"", "\"tcp\"", "sockets"),
        ("\"nvlink\"", "\"rdma\"", "MC_FORCE_MNNVL would replace rdma"),
        ("protocol = \"nvlink\"\n", "", "name it"),
        ("\"mooncake_gpu_direct\"", "\"shm\"", "takes no protocol"),
        ("accumulation = 2", "accumulation = 2000", "under one optimizer quantum"),
        ("layers = [5, 19, 33, 47, 61]", "layers = []", "number of layers"),
        ("port = 31000", "port = 30001", "used twice"),
        (
            "[trainer]",
            "high_watermark_bytes = \"2GiB\"\nmax_resident_bytes = \"1GiB\"\n[trainer]",
            "hard cap",
        ),
        ("\"nvlink\"", "\"nvlnk\"", "did you mean nvlink"),
        ("batch = 4", "bacth = 4", "did you mean batch"),
        ("arena = \"32GiB\"", "arena = \"-5\"", "arena"),
        ("arena = \"32GiB\"", "arena = 0", "zero"),
        ("host = \"10.0.0.2\"\nport = 31000", "host = \"\"\nport = 31000", "server.host"),
    ] {
        assert!(GOOD.contains(from), "{from}");
        let error = load(&GOOD.replacen(from, to, 1)).unwrap_err();
        assert!(error.to_string().contains(part), "{part}: {error}");
        assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
    }
    let both = GOOD.replacen("arena = \"32GiB\"\n", "", 1).replacen("force_mnnvl = true", "", 1);
    let error = load(&both).unwrap_err().to_string();
    assert!(error.contains("2 problems") && error.contains("MC_FORCE_MNNVL"), "{error}");
}

#[test]
fn all_that_is_missing_or_unknown_is_said_at_once() {
    let text = "[run]\nid = \"a\"\nlayer = [1]\n[[server]]\nhost = \"h\"\n[trainr]\n";
    let error = load(text).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
    let error = error.to_string();
    for part in [
        "10 problems",
        "setting=run.strategy",
        "setting=run.hidden",
        "setting=run.layers",
        "setting=run.max_length",
        "setting=run.model",
        "setting=run.control_dir",
        "setting=transport.backend", // of a section that is not there at all
        "setting=server[0].port",
        "found=run.layer)",
        "did you mean layers",
        "found=trainr",
        "did you mean trainer",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let unset = |name: &str| (name == "DISAGG_BACKEND").then(|| "shm".to_owned());
    let error = Loaded::text(text, Syntax::Toml, unset).unwrap_err().to_string();
    assert!(!error.contains("transport.backend"), "the environment gives it: {error}");
}

#[test]
fn trainers_over_our_transports_are_told_where_to_receive() {
    let told = |text: &str| -> Vec<Option<String>> {
        let receive = |role: &Role| role.env.get("FEATURESTORE_RECEIVE").cloned();
        load(text).unwrap().plan().roles.iter().map(receive).collect()
    };
    let with = |buffers: &str| {
        OVER_TCP.replacen("[transport]", &format!("[transport]\nreceive_buffers = {buffers:?}"), 1)
    };
    for (text, receive) in [
        (OVER_TCP.to_owned(), None),
        (with("cuda"), Some("device")),
        (with("pinned"), Some("host")),
        (with("pageable"), Some("host")),
    ] {
        // A server, the producer, two trainers.
        let receive = receive.map(str::to_owned);
        assert_eq!(told(&text), [None, None, receive.clone(), receive], "{text}");
    }
    assert!(told(GOOD).iter().all(Option::is_none), "Mooncake brings it there by itself");
    let error = load(&with("cuda").replacen("\"tcp\"", "\"shm\"", 1)).unwrap_err().to_string();
    for part in ["transport.receive_buffers", "server's memory", "choose the transport tcp"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn the_examples_are_runs() {
    for (text, role, part) in [
        (OVER_TCP, "server-0", "--http=127.0.0.1:30000"),
        (OVER_NVLINK, "server-0", "--spec-capture-aux-layer-ids 5 19 33 47 61"),
        (OVER_NVLINK, "trainer-3", "train.py"),
    ] {
        let loaded = load(text).unwrap();
        assert!(loaded.notes.is_empty(), "{:?}", loaded.notes);
        let plan = loaded.plan();
        let found = plan.roles.iter().find(|found| found.name == role).unwrap();
        assert!(found.argv.join(" ").contains(part), "{found:?}");
    }
    let readme = include_str!("../../../../README.md");
    assert!(readme.contains(OVER_TCP.trim()), "the README shows the file that `plan --help` does");
}

#[test]
fn protocols_are_forgiving_in_form_only() {
    for text in ["NVLINK", " nvlink ", "Nvlink"] {
        let loaded = load(&GOOD.replacen("\"nvlink\"", &format!("{text:?}"), 1)).unwrap();
        assert_eq!(loaded.config.transport.protocol, Some(Protocol::Nvlink));
    }
    assert_eq!("nvlink-intra".parse::<Protocol>().unwrap(), Protocol::NvlinkIntra);
    assert_eq!("NVLINK_INTRA".parse::<Protocol>().unwrap(), Protocol::NvlinkIntra);
    for text in ["", "rmda", "ib"] {
        let error = text.parse::<Protocol>().unwrap_err().to_string();
        assert!(error.contains("rdma, nvlink, nvlink_intra, tcp"), "{error}");
    }
}

#[test]
fn the_environment_beats_the_file_and_every_source_is_told() {
    let environment = |name: &str| match name {
        "SGLANG_SPEC_CAPTURE_ARENA_BYTES" => Some("17179869184".to_owned()),
        "DISAGG_IN_FLIGHT_HIGH_WATERMARK" => Some("512".to_owned()),
        "DISAGG_ASYNC_ACK" => Some("0".to_owned()),
        "MOONCAKE_RDMA_DEVICES" => Some(String::new()), // empty is not set
        _ => None,
    };
    let loaded = Loaded::text(GOOD, Syntax::Toml, environment).unwrap();
    assert_eq!(loaded.config.transport.arena.unwrap().0.get(), 16 << 30);
    assert!(!loaded.config.trainer.async_ack);
    let explained = loaded.explain();
    let source = |path: &str| {
        let line = explained.iter().find(|(p, ..)| p == path);
        line.unwrap_or_else(|| panic!("{path} in {explained:?}")).2.clone()
    };
    assert_eq!(source("transport.arena"), "environment SGLANG_SPEC_CAPTURE_ARENA_BYTES");
    assert_eq!(source("producer.high_watermark"), "environment DISAGG_IN_FLIGHT_HIGH_WATERMARK");
    assert_eq!(source("trainer.batch"), "file");
    assert_eq!(source("server[1].port"), "file");
    assert_eq!(source("producer.low_watermark"), "default");
    for (name, value, part) in [
        ("DISAGG_ASYNC_ACK", "maybe", "neither true nor false"),
        ("LOADER_PREFETCH", "-1", "not a number"),
        ("MOONCAKE_PROTOCOL", "rmda", "did you mean rdma"),
        ("SGLANG_SPEC_CAPTURE_GPU_PUT", "0", "conflicts"),
    ] {
        let variable = |n: &str| (n == name).then(|| value.to_owned());
        let error = Loaded::text(GOOD, Syntax::Toml, variable).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let both = |name: &str| name.ends_with("ARENA_BYTES").then(|| "1GiB".to_owned());
    assert!(Loaded::text(GOOD, Syntax::Toml, both).unwrap_err().to_string().contains("set twice"));
}

#[test]
fn what_will_be_regretted_is_noted() {
    let small = GOOD.replacen("arena = \"32GiB\"", "arena = \"1GiB\"", 1);
    let small =
        small.replacen("[trainer]", "high_watermark = 32\nlow_watermark = 16\n[trainer]", 1);
    let notes = load(&small).unwrap().notes.join("; ");
    assert!(notes.contains("all arenas") && notes.contains("6 times"), "{notes}");
    assert!(load(GOOD).unwrap().notes.is_empty());
}

#[test]
fn the_other_backends_plan_too_and_the_schema_knows_every_section() {
    let shm = over_shm();
    let loaded = load(&shm).unwrap();
    assert!(loaded.notes.iter().any(|note| note.contains("FEATURESTORE_TOKEN")), "{loaded:?}");
    assert!(load(&shm.replace("10.0.0.2", "127.0.0.1")).unwrap().notes.is_empty());
    let plan = loaded.plan();
    assert_eq!(&plan.roles[0].argv[..2], ["featurestore", "capture-server"]);
    let store = GOOD
        .replacen("mooncake_gpu_direct", "mooncake", 1)
        .replacen("\"nvlink\"", "\"rdma\"", 1)
        .replacen("force_mnnvl = true\n", "", 1);
    assert!(load(&store).unwrap_err().to_string().contains("no master"));
    let plan = load(&format!("{store}\n[mooncake]\nmaster = \"10.0.0.1:50051\"\n")).unwrap().plan();
    assert_eq!(plan.roles[0].name, "mooncake-master");
    assert_eq!(plan.roles[1].env["MC_FORCE_HCA"], "1");
    let schema = RunConfig::schema();
    for section in ["run", "transport", "server", "producer", "trainer", "mooncake"] {
        assert!(schema["properties"][section].is_object(), "{section}: {schema}");
    }
}

/// [`GOOD`] in the other language.
const GOOD_YAML: &str = r#"
# The same run.
run:
  id: run0
  strategy: dspark
  hidden: 5120
  layers: [5, 19, 33, 47, 61]
  max_length: 8192
  model: some/model
  control_dir: control
transport:
  backend: mooncake_gpu_direct
  protocol: nvlink
  arena: 32GiB
  receive_buffers: cuda
  force_mnnvl: true
server:
  - {host: 10.0.0.2, port: 30000, control_port: 30001, gpus: [0, 1, 2, 3]}
  - host: 10.0.0.2
    port: 31000
    gpus: [4, 5, 6, 7]
producer:
  command: [python, train.py, --role, "producer's own"]
trainer:
  ranks: 2
  batch: 4
  accumulation: 2
"#;

#[test]
fn a_run_says_the_same_in_both_languages() {
    let yaml = |text: &str| Loaded::text(text, Syntax::Yaml, none);
    let loaded = yaml(GOOD_YAML).unwrap();
    assert_eq!(loaded.config, load(GOOD).unwrap().config);
    assert_eq!(loaded.explain(), load(GOOD).unwrap().explain());
    for (from, to, part) in [
        ("batch: 4", "bacth: 4", "did you mean batch"),
        ("batch: 4", "batch: 4\n  batch: 5", "batch"),
        ("protocol: nvlink", "protocol: nvlnk", "did you mean nvlink"),
        ("force_mnnvl: true", "force_mnnvl: yes", "force_mnnvl"),
        ("batch: 4", "batch: ~", "unit value"),
        ("  arena: 32GiB\n", "", "SGLANG_SPEC_CAPTURE_ARENA_BYTES"),
        ("layers: [5", "layers: [[5", "at line 8"),
    ] {
        assert!(GOOD_YAML.contains(from), "{from}");
        let error = yaml(&GOOD_YAML.replacen(from, to, 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    // A file that would grow without end is refused, not read.
    let mut bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for (name, of) in ('b'..='k').zip('a'..) {
        bomb +=
            &format!("{name}: &{name} [*{of}, *{of}, *{of}, *{of}, *{of}, *{of}, *{of}, *{of}]\n");
    }
    assert_eq!(yaml(&bomb).unwrap_err().kind(), ErrorKind::ConfigInvalid);
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [("run.yml", GOOD_YAML), ("run.YAML", GOOD_YAML), ("run.toml", GOOD)] {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        assert_eq!(Loaded::file(&path, none).unwrap().config, loaded.config, "{name}");
    }
}

#[test]
fn a_capture_server_of_ours_is_told_addresses_it_can_listen_at() {
    let shm = over_shm();
    let plan = load(&shm.replace("10.0.0.2", "localhost")).unwrap().plan();
    assert!(plan.roles[0].argv.contains(&"--http=127.0.0.1:30000".to_owned()), "{plan:?}");
    let plan = load(&shm.replace("10.0.0.2", "2001:db8::1")).unwrap().plan();
    for part in ["--http=[2001:db8::1]:30000", "--data=[2001:db8::1]:0"] {
        assert!(plan.roles[0].argv.contains(&part.to_owned()), "{plan:?}");
    }
    let urls = &plan.roles[2].env["DISAGG_SERVER_URLS"];
    assert_eq!(urls, "http://[2001:db8::1]:30000,http://[2001:db8::1]:31000");
    for name in ["gpu-node-7", "fe80::1%eth0"] {
        let error = load(&shm.replace("10.0.0.2", name)).unwrap_err().to_string();
        assert!(error.contains("server.host") && error.contains(name), "{error}");
        assert!(error.contains("--advertise"), "what to do: {error}");
    }
    // Inference servers take names.
    load(&GOOD.replace("10.0.0.2", "gpu-node-7")).unwrap();
}

#[test]
fn d21_refusals_have_the_words_that_people_search_for() {
    let rdma = GOOD.replacen("\"nvlink\"", "\"rdma\"", 1).replacen("force_mnnvl = true\n", "", 1);
    for (text, words) in [
        (GOOD.replacen("arena = \"32GiB\"\n", "", 1), "SGLANG_SPEC_CAPTURE_ARENA_BYTES"),
        (GOOD.replacen("\"cuda\"", "\"pinned\"", 1), "receive_buffers=cuda"),
        (GOOD.replacen("force_mnnvl", "gpu_put = false\nforce_mnnvl", 1), "conflicts"),
        (
            rdma.replacen("\"rdma\"", "\"tcp\"", 1)
                .replacen("mooncake_gpu_direct", "mooncake", 1)
                .replacen("[transport]", "[transport]\ngpu_put = true", 1),
            "requires MOONCAKE_PROTOCOL=rdma",
        ),
    ] {
        let error = load(&text).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
    let staged = rdma.replacen("[transport]", "[transport]\ngpu_put = false", 1);
    let notes = load(&staged).unwrap().notes.join("; ");
    assert!(notes.contains("CPU staging"), "{notes}");
}

#[test]
fn values_that_cannot_run_are_refused_by_name() {
    for (text, words) in [
        (OVER_TCP.replacen("\"draft-1\"", "\"\"", 1), "run.id"),
        (OVER_TCP.replacen("\"draft-1\"", "\"a/b\"", 1), "run.id"),
        (OVER_TCP.replacen("\"draft-1\"", "\"a\\u0007b\"", 1), "run.id"),
        (OVER_TCP.replacen("port = 30000", "port = 0", 1), "server.port"),
        (OVER_TCP.replacen("hidden = 5120", "hidden = 1048577", 1), "run.hidden"),
        (OVER_TCP.replacen("\"32GiB\"", "\"1KiB\"", 1), "one token"),
        (
            OVER_TCP.replacen("[trainer]", "[producer]\nmax_resident_bytes = 8\n[trainer]", 1),
            "one token",
        ),
        (OVER_TCP.replacen("[trainer]", "[trainer]\nleader = \"nobody\"", 1), "trainer.leader"),
        (OVER_TCP.replacen("[trainer]", "[trainer]\nleader = \"a:0\"", 1), "trainer.leader"),
        (
            OVER_TCP.replacen("[trainer]", "[trainer]\nleader = \"127.0.0.1:30000\"", 1),
            "trainer.leader",
        ),
        (
            OVER_TCP.replacen("port = 30000", "port = 30000\nenv = { \"A;reboot\" = \"1\" }", 1),
            "A;reboot",
        ),
        (OVER_TCP.replacen("port = 30000", "port = 30000\nenv = { \"1A\" = \"1\" }", 1), "1A"),
    ] {
        let error = load(&text).expect_err(&text).to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
    load(OVER_TCP).unwrap();
}

#[test]
fn a_file_that_cannot_be_read_says_where() {
    let error = load("[run]\nid = \"a\"\nid = \"b\"\n").unwrap_err().to_string();
    assert!(error.contains("\"id\"") && error.contains("line 3, column 1"), "{error}");
    let error = load("[run]\n  id 5\n").unwrap_err().to_string();
    assert!(error.contains("line 2, column"), "{error}");
}
