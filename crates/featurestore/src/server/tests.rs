//! A capture server whose arena is on a simulated device, and a trainer on another one.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Backing, RegionPool,
    cuda::{
        ArenaPeers, CudaError, Device, DeviceArenaConfig, DevicePtr, Staging, StagingConfig,
        scripted::{Machine, ScriptedCuda},
    },
};
use control_proto::capture::{
    CHECKSUMS_ANY, CHECKSUMS_HEADER, CaptureOutcome, CaptureRequest, ChecksumKind, Form, Limits,
    Mixsum, Passthrough, Prompt, Row, SampleRequest, parse_response,
};
use transport_core::{
    Destination, Dtype, FeatureName, FetchOptions, FetchRequest, Generation, Release, SampleId,
    SampleKey, StoreId, TensorMeta,
};
use transport_mooncake_direct::{
    DirectTransport, Engine,
    cuda::{CudaEngine, CudaOptions, DeviceTensors, simulate_kernels},
};

use super::{
    CaptureServer, bind_http,
    memory::{Memory, device::take_with},
    publisher::Publisher,
};
use crate::{
    Settings,
    config::ServerConfig,
    input::Folder,
    source::Source,
    workload::{Model, Stream},
};

const SEED: u64 = 7;

fn machine() -> Arc<ScriptedCuda> {
    let cuda = ScriptedCuda::new(Machine::default());
    simulate_kernels(&cuda);
    cuda
}

fn config(transport: &str) -> ServerConfig {
    let mut settings = Settings::new().or_default("arena", "16MiB").unwrap();
    settings.set("transport", transport).unwrap();
    ServerConfig::from_settings(&settings).unwrap()
}

fn model() -> Model {
    Model { hidden: 24, taps: vec![1, 2, 3] }
}

struct Running {
    url: String,
    health: String,
    end: Option<tokio::sync::oneshot::Sender<()>>,
    serving: tokio::task::JoinHandle<()>,
}

impl Running {
    async fn start(cuda: &Arc<ScriptedCuda>, source: Source) -> Self {
        let config = config("nvlink_intra");
        let memory = take_with(cuda.clone(), &config).unwrap();
        assert!(memory.reason.contains("plain memory of Scripted GPU 0"), "{}", memory.reason);
        assert_eq!(memory.name, "device");
        Self::over(memory, &config, source).await
    }

    /// With an arena in host memory.
    async fn on_host(source: Source) -> Self {
        let config = config("tcp");
        let memory = Memory::take(&config).unwrap();
        assert_eq!(memory.name, "shared");
        Self::over(memory, &config, source).await
    }

    async fn over(memory: Memory, config: &ServerConfig, source: Source) -> Self {
        let name = memory.name;
        let publisher = Publisher::over(memory, config).unwrap();
        let listener = bind_http(config.http).await.unwrap();
        let server = CaptureServer::over(listener, publisher, config, source).await.unwrap();
        let ready = server.ready_line();
        assert_eq!(ready.memory, name);
        let (end, ended) = tokio::sync::oneshot::channel();
        let serving = tokio::spawn(async move {
            server.serve(async move { drop(ended.await) }).await.unwrap();
        });
        let url = format!("http://{}/generate", ready.http);
        let health = format!("http://{}/health", ready.http);
        Self { url, health, end: Some(end), serving }
    }

    async fn capture(&self, prompts: Vec<Prompt>, checksums: &str) -> Result<Vec<Row>, String> {
        self.capture_as(prompts, Some(checksums)).await
    }

    async fn capture_as(
        &self,
        prompts: Vec<Prompt>,
        checksums: Option<&str>,
    ) -> Result<Vec<Row>, String> {
        let keys: Vec<_> = prompts.iter().map(|prompt| prompt.sample.sample.clone()).collect();
        let mut body = Vec::new();
        CaptureRequest::new(Form::Patch, prompts).write(&mut body).unwrap();
        let mut request = reqwest::Client::new().post(&self.url).body(body);
        if let Some(checksums) = checksums {
            request = request.header(CHECKSUMS_HEADER, checksums);
        }
        let answer = request.send().await.unwrap();
        let status = answer.status();
        let body = answer.bytes().await.unwrap();
        if !status.is_success() {
            return Err(String::from_utf8_lossy(&body).into_owned());
        }
        Ok(parse_response(&body, &keys, &Limits::default()).unwrap())
    }

    async fn health(&self) -> serde_json::Value {
        let text = reqwest::get(&self.health).await.unwrap().text().await.unwrap();
        serde_json::from_str(&text).unwrap()
    }

    async fn stop(mut self) {
        drop(self.end.take());
        self.serving.await.unwrap();
    }
}

fn prompt(id: &str, tokens: usize) -> Prompt {
    let sample = SampleId::new(id).unwrap();
    let key = SampleKey::new(StoreId::new("s").unwrap(), sample, Generation(1));
    let mut sample = SampleRequest::new(key);
    sample.aux = Some(FeatureName::new("hidden_states").unwrap());
    sample.last_hidden = Some(FeatureName::new("target_last_hidden_states").unwrap());
    let ids: Vec<i64> = (0..tokens as i64).collect();
    let meta = TensorMeta::new(Dtype::Int64, [1, tokens as u64]).unwrap();
    let name = FeatureName::new("input_ids").unwrap();
    sample.passthrough.push(Passthrough::new(name, meta, ids.clone()).unwrap());
    Prompt { input_ids: ids, extra_key: None, sample }
}

fn trainer(cuda: &Arc<ScriptedCuda>) -> (Arc<DirectTransport>, RegionPool) {
    let device = Device::open(cuda.clone(), 0).unwrap();
    let engine = CudaEngine::new(&device, CudaOptions::default()).unwrap();
    let memory = DeviceArenaConfig::new(8 << 20, ArenaPeers::Nobody);
    let pool = RegionPool::new(Backing::device(&device, &memory).unwrap()).unwrap();
    let builder = DirectTransport::builder().engine(Engine::Cuda).cuda(engine).pool(pool.clone());
    (Arc::new(builder.build().unwrap()), pool)
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_are_made_on_the_device_and_arrive_on_another() {
    let (servers, trainers) = (machine(), machine());
    let server = Running::start(&servers, Source::Synthetic { model: model(), seed: SEED }).await;
    let rows = server.capture(vec![prompt("a", 3), prompt("b", 4)], CHECKSUMS_ANY).await.unwrap();
    let (transport, pool) = trainer(&trainers);
    let mut descriptors = Vec::new();
    for (row, tokens) in rows.into_iter().zip(3..) {
        let CaptureOutcome::Captured(descriptor) = row.outcome else { panic!("{row:?}") };
        let descriptor = Arc::new(descriptor);
        let (fetching, wanted) = (transport.clone(), descriptor.clone());
        let fetched = tokio::task::spawn_blocking(move || {
            let request = FetchRequest::new(wanted, Destination::Pool);
            fetching.fetch_blocking(vec![request], &FetchOptions::default()).unwrap().remove(0)
        });
        let fetched = fetched.await.unwrap();
        let sums = row.checksums.unwrap();
        assert_eq!(fetched.tensors.len(), 3);
        for (name, tensor) in &fetched.tensors {
            let at = DevicePtr(tensor.data.address() as u64);
            let found = trainers.peek(at, tensor.data.len() as u64);
            let mut expected = vec![0; found.len()];
            if name.as_str() == "input_ids" {
                expected = (0..tokens).flat_map(|id: i64| id.to_le_bytes()).collect();
            } else {
                Stream::new(SEED, &descriptor.sample.sample_id, name).write(0, &mut expected);
            }
            assert!(found == expected, "{name}");
            assert_eq!(sums[name].kind, ChecksumKind::Mixsum);
            assert_eq!(sums[name].value, Mixsum::of(&expected), "{name}");
        }
        drop(fetched);
        descriptors.push(descriptor);
    }
    assert_eq!(pool.stats().free, pool.stats().capacity);
    let health = server.health().await;
    assert_eq!(health["host_payload_bytes"], 8 * (3 + 4), "only ids came from the host: {health}");
    let releases = descriptors.into_iter().map(Release::from).collect();
    let (releasing, measured) = (transport.clone(), transport.clone());
    let released = tokio::task::spawn_blocking(move || releasing.release_blocking(releases));
    assert_eq!(released.await.unwrap().unwrap().released, 2);
    let measured = tokio::task::spawn_blocking(move || measured.health_blocking().unwrap());
    assert_eq!(measured.await.unwrap().host_payload_bytes, 0);
    let health = server.health().await;
    assert_eq!(health["arena_largest_free"], health["arena_bytes"]);
    server.stop().await;
    tokio::task::spawn_blocking(move || drop(transport)).await.unwrap();
    drop(pool);
    eventually("nothing is left", || servers.leaks().is_empty() && trainers.leaks().is_empty());
}

/// What the pipeline does over tcp with `receive = device`, on simulated machines.
#[tokio::test(flavor = "multi_thread")]
async fn samples_are_made_on_the_host_and_compared_on_a_device() {
    let trainers = machine();
    let server = Running::on_host(Source::Synthetic { model: model(), seed: SEED }).await;
    let rows = server.capture(vec![prompt("a", 3), prompt("b", 4)], "mixsum").await.unwrap();
    let device = Device::open(trainers.clone(), 0).unwrap();
    let memory = DeviceArenaConfig::new(8 << 20, ArenaPeers::Nobody);
    let pool = RegionPool::new(Backing::device(&device, &memory).unwrap()).unwrap();
    let builder = DirectTransport::builder().engine(Engine::Tcp).pool(pool);
    let staging = Staging::new(&device, StagingConfig::default()).unwrap();
    let transport = Arc::new(builder.staging(staging).build().unwrap());
    let tensors = DeviceTensors::load(&device).unwrap();
    let mut bytes = 0;
    for row in rows {
        let CaptureOutcome::Captured(descriptor) = row.outcome else { panic!("{row:?}") };
        bytes += descriptor.nbytes();
        let (fetching, tensors) = (transport.clone(), tensors.clone());
        let sums = row.checksums.unwrap();
        let compared = tokio::task::spawn_blocking(move || {
            let request = FetchRequest::new(Arc::new(descriptor), Destination::Pool);
            let options = FetchOptions::default();
            let fetched = fetching.fetch_blocking(vec![request], &options).unwrap().remove(0);
            let data: Vec<_> = fetched.tensors.values().map(|tensor| tensor.data.clone()).collect();
            let found = tensors.sums(&data, Instant::now() + Duration::from_secs(10)).unwrap();
            for (name, found) in fetched.tensors.keys().zip(found) {
                assert_eq!((sums[name].kind, sums[name].value), (ChecksumKind::Mixsum, found));
            }
            fetched.tensors.len()
        });
        assert_eq!(compared.await.unwrap(), 3);
    }
    let health = tokio::task::spawn_blocking(move || transport.health_blocking().unwrap());
    assert_eq!(health.await.unwrap().host_payload_bytes, bytes, "each byte through the host, once");
    server.stop().await;
    drop((tensors, device));
    eventually("nothing is left", || trainers.leaks().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_brought_to_the_device_and_counted() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/minilm-capture");
    let folder = Folder::open(Path::new(folder)).unwrap();
    let name = folder.names().next().unwrap().to_owned();
    let sample = folder.sample(&name).unwrap();
    let tokens = sample.tokens().unwrap() as usize;
    let hidden = FeatureName::new("hidden_states").unwrap();
    let mut expected = vec![0; sample.meta(&hidden).unwrap().nbytes() as usize];
    sample.read(&hidden, &mut expected).unwrap();
    let cuda = machine();
    let server = Running::start(&cuda, Source::Folder(folder)).await;
    let rows = server.capture(vec![prompt(&name, tokens)], "mixsum").await.unwrap();
    let CaptureOutcome::Captured(descriptor) = &rows[0].outcome else { panic!("{rows:?}") };
    let at = DevicePtr(descriptor.features[&hidden].address.unwrap().0);
    assert!(cuda.peek(at, expected.len() as u64) == expected);
    assert_eq!(rows[0].checksums.as_ref().unwrap()[&hidden].value, Mixsum::of(&expected));
    let health = server.health().await;
    assert_eq!(health["host_payload_bytes"], descriptor.nbytes(), "all of it came from the host");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_fails_is_a_failed_capture_and_its_ranges_come_back() {
    let cuda = machine();
    let server = Running::start(&cuda, Source::Synthetic { model: model(), seed: SEED }).await;
    let error = server.capture(vec![prompt("a", 3)], "xxh3").await.unwrap_err();
    assert!(error.contains("ask for mixsum"), "{error}");
    cuda.fail("cuLaunchKernel", 1, 1, CudaError::OUT_OF_MEMORY);
    let rows = server.capture(vec![prompt("a", 3), prompt("b", 4)], "mixsum").await.unwrap();
    for row in &rows {
        let CaptureOutcome::Failed { error, .. } = &row.outcome else { panic!("{row:?}") };
        assert!(error.contains("cuLaunchKernel"), "{error}");
    }
    let health = server.health().await;
    assert_eq!(health["arena_largest_free"], health["arena_bytes"], "{health}");
    let rows = server.capture(vec![prompt("a", 3), prompt("b", 4)], "mixsum").await.unwrap();
    assert!(rows.iter().all(|row| matches!(row.outcome, CaptureOutcome::Captured(_))), "{rows:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_that_wait_are_written_together_and_each_gets_its_own() {
    let cuda = machine();
    let server = Running::start(&cuda, Source::Synthetic { model: model(), seed: SEED }).await;
    let server = Arc::new(server);
    let before = cuda.calls("cuLaunchKernel");
    let capture = |i: usize| {
        let server = server.clone();
        tokio::spawn(async move {
            let prompts = vec![prompt(&format!("a{i}"), 3 + i), prompt(&format!("b{i}"), 5)];
            // Some ask for checksums, and some do not.
            let checksums = if i.is_multiple_of(3) { None } else { Some("mixsum") };
            (i, server.capture_as(prompts, checksums).await.unwrap())
        })
    };
    let captures: Vec<_> = (0..24).map(capture).collect();
    for captured in captures {
        let (i, rows) = captured.await.unwrap();
        for (row, tokens) in rows.iter().zip([3 + i, 5]) {
            let CaptureOutcome::Captured(sample) = &row.outcome else { panic!("{row:?}") };
            assert_eq!(row.checksums.is_some(), !i.is_multiple_of(3));
            for (name, feature) in &sample.features {
                let at = DevicePtr(feature.address.unwrap().0);
                let found = cuda.peek(at, feature.meta.nbytes());
                let mut expected = vec![0; found.len()];
                if name.as_str() == "input_ids" {
                    expected = (0..tokens as i64).flat_map(i64::to_le_bytes).collect();
                } else {
                    Stream::new(SEED, &sample.sample.sample_id, name).write(0, &mut expected);
                }
                assert!(found == expected, "{name} of {}", sample.sample);
                let sum = row.checksums.as_ref().map(|sums| sums[name].value);
                assert!(sum.is_none_or(|sum| sum == Mixsum::of(&expected)), "{name}");
            }
        }
    }
    // Two tensors are made of each sample; what is more are sums, one a writing and 64 tensors.
    let sums = cuda.calls("cuLaunchKernel") - before - 24 * 2 * 2;
    println!("{sums} launches that sum up, for 24 batches");
    Arc::try_unwrap(server).ok().expect("nobody else uses it").stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_its_manifest_denies_fails_alone() {
    let real = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/minilm-capture");
    let copy = tempfile::tempdir().unwrap();
    for entry in Path::new(real).read_dir().unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let manifest = copy.path().join("manifest.json");
    let folder = Folder::open(copy.path()).unwrap();
    let names: Vec<String> = folder.names().map(Into::into).collect();
    let tokens: Vec<usize> =
        names.iter().map(|name| folder.sample(name).unwrap().tokens().unwrap() as usize).collect();
    let sum = folder.sample(&names[0]).unwrap().sha256()["hidden_states"].clone();
    let text = std::fs::read_to_string(&manifest).unwrap().replace(&sum, &"0".repeat(64));
    std::fs::remove_file(&manifest).unwrap(); // the copy may be read-only
    std::fs::write(&manifest, text).unwrap();
    let cuda = machine();
    let source = || Source::Folder(Folder::open(copy.path()).unwrap());
    let one = |i: usize| vec![prompt(&names[i], tokens[i])];
    for server in [Running::start(&cuda, source()).await, Running::on_host(source()).await] {
        let rows = server.capture(one(0), "mixsum").await.unwrap();
        let CaptureOutcome::Failed { error, .. } = &rows[0].outcome else { panic!("{rows:?}") };
        assert!(error.contains("manifest disagree") && error.contains("hidden_states"), "{error}");
        let rows = server.capture(one(1), "mixsum").await.unwrap();
        assert!(matches!(rows[0].outcome, CaptureOutcome::Captured(_)), "{rows:?}");
        server.stop().await;
    }
    // Who compares on the host knows the manifest, and finds out.
    let server = Running::on_host(source()).await;
    let rows = server.capture(one(0), "xxh3").await.unwrap();
    assert!(matches!(rows[0].outcome, CaptureOutcome::Captured(_)), "{rows:?}");
    server.stop().await;
}

#[test]
fn an_arena_is_where_its_trainers_can_read_it() {
    let mut settings = Settings::new().or_default("arena", "1MiB").unwrap();
    settings.set("receive", "host").unwrap();
    let memory = Memory::take(&ServerConfig::from_settings(&settings).unwrap()).unwrap();
    assert_eq!(memory.name, "shared");
    assert!(memory.reason.contains("receive = host"), "no device was tried: {}", memory.reason);
}

#[test]
fn memory_that_is_not_there_is_said_at_the_start() {
    let cuda = machine();
    let refused = |transport: &str, device: &str, arena: &str| {
        let mut settings = Settings::new();
        for (name, value) in [("transport", transport), ("device", device), ("arena", arena)] {
            settings.set(name, value).unwrap();
        }
        let config = ServerConfig::from_settings(&settings).unwrap();
        match take_with(cuda.clone(), &config) {
            Ok(_) => panic!("{transport}, {device}, {arena} were taken"),
            Err(error) => error.to_string(),
        }
    };
    let fabric = refused("nvlink", "0", "1MiB");
    assert!(fabric.contains("nvlink_intra"), "the remedy: {fabric}");
    let none = refused("nvlink_intra", "3", "1MiB");
    assert!(none.contains("sees no such device"), "{none}");
    let large = refused("nvlink_intra", "0", "8GiB");
    assert!(large.contains("choose an arena smaller than"), "{large}");
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
