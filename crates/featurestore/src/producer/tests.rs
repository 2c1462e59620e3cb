mod restart;
mod room;

use std::collections::{HashMap, VecDeque};

use axum::{
    Router as Routes,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use control_proto::capture::{
    CaptureOutcome, CaptureRequest, FailureCause, Limits, Prompt, Row, write_response,
};
use indexmap::IndexMap;
use transport_core::{
    Dtype, MemoryTransport, Publication, PublishOptions, Ready, RegionSlice, StoreId, Tensor,
    TensorMeta, Transport,
};

use super::*;
use crate::{
    channel::RefReader,
    layout::{Layout, Strategy},
    lifecycle::Retention,
};

/// What a server does with one request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    Good,
    /// Captures, and its answer is lost.
    Loses,
    /// Answers with another store's identity in this row.
    WrongStore(usize),
    /// Captures with the wrong layers in the first row.
    WrongLayers,
    /// Does not say which layers.
    NoLayers,
    /// Captures one token too few in the first row.
    WrongLength,
    /// Says that the first row failed.
    BadRow,
    /// Answers rows in another order.
    Reversed,
    /// Answers each row twice.
    Twice,
    /// Puts the request off.
    Busy,
    /// Says of each sample that it failed for this.
    Refuses(FailureCause),
    /// Fails.
    Broken,
    /// Answers late.
    Late,
    /// Has room for more than this many tokens only where nothing else is.
    InPieces(usize),
}

/// A capture server over a memory transport.
struct Server {
    publisher: Arc<MemoryTransport>,
    does: Mutex<VecDeque<Does>>,
    otherwise: Does,
    seen: Mutex<Vec<(String, bool, String)>>, // sample, replace, extra key
}

fn layout() -> Layout {
    Layout::new(Strategy::Dspark, 4, vec![1, 3]).unwrap()
}

async fn generate(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    body: Bytes,
) -> (StatusCode, Vec<u8>) {
    let request = CaptureRequest::parse(&body, &Limits::default()).unwrap();
    let does = server.does.lock().pop_front().unwrap_or(server.otherwise);
    for prompt in &request.prompts {
        let key = prompt.extra_key.clone().unwrap();
        let id = prompt.sample.sample.sample_id.to_string();
        server.seen.lock().push((id, prompt.sample.replace, key));
    }
    match does {
        Does::Busy => return (StatusCode::SERVICE_UNAVAILABLE, b"busy".to_vec()),
        Does::Broken => return (StatusCode::INTERNAL_SERVER_ERROR, b"broken".to_vec()),
        Does::Refuses(cause) => return room::refuse(&request, Some(cause)),
        Does::Late => tokio::time::sleep(Duration::from_millis(400)).await,
        Does::InPieces(most) => {
            let large = |prompt: &Prompt| prompt.input_ids.len() > most;
            if request.prompts.iter().any(large) && !server.empty_within(&headers).await {
                return room::refuse(&request, None);
            }
        }
        _ => {}
    }
    let mut rows = Vec::new();
    for (i, prompt) in request.prompts.iter().enumerate() {
        let first = i == 0;
        let sample = prompt.sample.sample.clone();
        if does == Does::BadRow && first {
            rows.push(failed_row(prompt, "cached prefix"));
            continue;
        }
        let short = u64::from(does == Does::WrongLength && first);
        let tokens = prompt.input_ids.len() as u64 - short;
        let mut tensors = IndexMap::new();
        for name in prompt.sample.names() {
            let meta = match name.as_str() {
                "hidden_states" => TensorMeta::new(Dtype::Bfloat16, [1, tokens, 8]),
                "target_last_hidden_states" => TensorMeta::new(Dtype::Bfloat16, [1, tokens, 4]),
                _ => TensorMeta::new(Dtype::Int64, [1, tokens]),
            };
            let meta = meta.unwrap();
            let data = RegionSlice::copy_of(&vec![i as u8; meta.nbytes() as usize]);
            tensors.insert(name.clone(), Tensor::new(meta, data).unwrap());
        }
        let mut publication = Publication::new(sample, tensors, Ready::Now);
        publication.aux_layer_ids = match does {
            Does::WrongLayers if first => Some(vec![1, 4]),
            Does::NoLayers if first => None,
            _ => Some(vec![1, 3]),
        };
        let options = PublishOptions::default().replace(prompt.sample.replace);
        let mut descriptor =
            server.publisher.publish(vec![publication], options).await.unwrap().remove(0);
        if does == Does::WrongStore(i) {
            descriptor.sample.store_id = StoreId::new("other").unwrap();
        }
        rows.push(Row { outcome: CaptureOutcome::Captured(descriptor), checksums: None });
    }
    if does == Does::Loses {
        return (StatusCode::BAD_GATEWAY, Vec::new());
    }
    if does == Does::Reversed {
        rows.reverse();
    }
    if does == Does::Twice {
        rows = rows.into_iter().flat_map(|row| [row.clone(), row]).collect();
    }
    let mut out = Vec::new();
    write_response(&mut out, request.form, request.batched, &rows).unwrap();
    (StatusCode::OK, out)
}

fn failed_row(prompt: &Prompt, error: &str) -> Row {
    let (sample_id, error) = (prompt.sample.sample.sample_id.clone(), error.into());
    let outcome = CaptureOutcome::Failed { sample_id, error, retryable: true, cause: None };
    Row { outcome, checksums: None }
}

impl Server {
    async fn start(does: &[Does], otherwise: Does) -> (Arc<Self>, String) {
        let publisher = MemoryTransport::builder().arena_bytes(1 << 24).build().unwrap();
        Self::over(Arc::new(publisher), does, otherwise).await
    }

    async fn over(
        publisher: Arc<MemoryTransport>,
        does: &[Does],
        otherwise: Does,
    ) -> (Arc<Self>, String) {
        let does = Mutex::new(does.iter().copied().collect());
        let server = Arc::new(Self { publisher, does, otherwise, seen: Mutex::default() });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let routes = Routes::new().route("/generate", post(generate)).with_state(server.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        (server, url)
    }

    async fn resident(&self) -> u64 {
        self.publisher.health().await.unwrap().resident_samples
    }
}

struct Client {
    samples: Arc<Samples>,
    endpoints: Arc<Endpoints>,
    client: CaptureClient,
}

fn client(server: &Server, url: &str) -> Client {
    client_with(server, url, Retention::default(), Duration::from_secs(5))
}

fn client_with(server: &Server, url: &str, retention: Retention, timeout: Duration) -> Client {
    let transport: Arc<dyn Transport> = Arc::new(server.publisher.client());
    let endpoints = Arc::new(Endpoints::new(transport.clone(), Strategy::Dspark));
    endpoints.tell(url, "memory:1".parse().unwrap());
    let samples = Arc::new(Samples::over(transport, retention).reclaiming(endpoints.clone()));
    let mut options = CaptureOptions::new(StoreId::new("run").unwrap(), layout());
    options.timeout = timeout;
    let client = CaptureClient::new(options, samples.clone(), endpoints.clone());
    Client { samples, endpoints, client }
}

fn task(i: usize) -> Task {
    let id = SampleId::new(format!("run:task-{i}")).unwrap();
    Task::new(id, vec![7; 5 + i % 3], vec![1; 5 + i % 3])
}

fn tasks(count: usize) -> Vec<Task> {
    (0..count).map(task).collect()
}

#[tokio::test]
async fn d3_a_lost_answer_is_tried_again_with_replace_and_leaves_nothing() {
    let (server, url) = Server::start(&[Does::Loses], Does::Good).await;
    let Client { samples, client, .. } = client(&server, &url);
    let answer = client.capture(&url, tasks(1)).await;
    let (mut task, outcome) = answer.prompts.into_iter().next().unwrap();
    assert!(outcome.unwrap_err().is_temporary() && !answer.served);
    assert_eq!(samples.health().provisional, 1);
    task.attempt = 1;
    let answer = client.capture(&url, vec![task]).await;
    let descriptor = &answer.prompts[0].1.as_ref().unwrap().descriptor;
    assert_eq!(descriptor.sample.generation.0, 1, "never a second generation");
    let seen = server.seen.lock().clone();
    assert_eq!((seen[0].1, seen[1].1), (false, true));
    assert_ne!(seen[0].2, seen[1].2, "a fresh cache key each attempt");
    assert_eq!(samples.reclaim().await.unwrap(), 0);
    assert_eq!(server.resident().await, 1);
}

#[tokio::test]
async fn d4_a_lost_answer_that_is_not_tried_again_is_reclaimed() {
    let (server, url) = Server::start(&[Does::Loses], Does::Good).await;
    let Client { samples, client, .. } = client(&server, &url);
    client.capture(&url, tasks(1)).await;
    assert_eq!((samples.health().provisional, server.resident().await), (1, 1));
    assert_eq!(samples.reclaim().await.unwrap(), 1);
    assert_eq!((samples.health().provisional, server.resident().await), (0, 0));
}

#[tokio::test]
async fn a_retry_on_another_replica_does_not_strand_the_first_and_one_place_is_one() {
    let (first, url) = Server::start(&[Does::Loses; 2], Does::Good).await;
    let Client { samples, client, endpoints } = client(&first, "http://nobody");
    // Both replicas are reached through one transport here; the first says that it is elsewhere.
    let (second, other) = Server::over(first.publisher.clone(), &[], Does::Good).await;
    endpoints.tell(&url, "elsewhere:1".parse().unwrap());
    let mut lost = client.capture(&url, tasks(1)).await.prompts.remove(0).0;
    lost.attempt = 1;
    let captured = client.capture(&other, vec![lost]).await.prompts.remove(0).1.unwrap().descriptor;
    assert_eq!(second.seen.lock().len(), 1);
    assert_eq!(samples.places(&captured.sample), [&*url], "it may still hold its own");
    // A second address of the same server is no other place: nothing is freed there.
    let (_, alias) = Server::over(first.publisher.clone(), &[Does::Loses], Does::Good).await;
    endpoints.learn(&alias, &captured);
    let mut lost = client.capture(&alias, vec![task(5)]).await.prompts.remove(0).0;
    lost.attempt = 1;
    let captured = client.capture(&other, vec![lost]).await.prompts.remove(0).1.unwrap().descriptor;
    assert!(samples.places(&captured.sample).is_empty());
}

#[tokio::test]
async fn d5_another_stores_identity_fails_the_whole_answer() {
    let (server, url) = Server::start(&[Does::WrongStore(1)], Does::Good).await;
    let Client { samples, client, .. } = client(&server, &url);
    let answer = client.capture(&url, tasks(2)).await;
    for (_, outcome) in &answer.prompts {
        let error = outcome.as_ref().unwrap_err();
        assert!(error.to_string().contains("wrong object identity"), "{error}");
    }
    let health = samples.health();
    assert_eq!((health.resident_samples, health.provisional), (0, 2));
    assert_eq!(samples.reclaim().await.unwrap(), 2);
    assert_eq!(server.resident().await, 0);
}

#[tokio::test]
async fn d7_bad_rows_among_good_ones_are_freed_and_not_tried_again() {
    for (does, part) in [
        (Does::WrongLayers, "other layers"),
        (Does::NoLayers, "does not say which layers"),
        (Does::WrongLength, "another length than the prompt"),
    ] {
        let (server, url) = Server::start(&[does], Does::Good).await;
        let Client { samples, client, .. } = client(&server, &url);
        let answer = client.capture(&url, tasks(3)).await;
        assert!(answer.served);
        let (bad, good): (Vec<_>, Vec<_>) =
            answer.prompts.iter().partition(|(_, outcome)| outcome.is_err());
        assert_eq!((bad.len(), good.len()), (1, 2), "{does:?}");
        let error = bad[0].1.as_ref().unwrap_err();
        assert!(error.to_string().contains(part) && !error.is_temporary(), "{error}");
        assert_eq!(bad[0].0.sample_id.as_str(), "run:task-0");
        assert_eq!((server.resident().await, samples.health().provisional), (2, 0));
    }
}

#[tokio::test]
async fn a_row_that_failed_is_tried_again_alone_and_rows_out_of_order_are_refused() {
    let (server, url) = Server::start(&[Does::BadRow, Does::Reversed], Does::Good).await;
    let Client { samples, client, .. } = client(&server, &url);
    let answer = client.capture(&url, tasks(2)).await;
    let failed = answer.prompts.iter().filter(|(_, o)| o.is_err()).count();
    assert_eq!((failed, samples.health().provisional), (1, 0));
    let more = vec![task(10), task(11)];
    let answer = client.capture(&url, more).await;
    assert!(answer.prompts.iter().all(|(_, o)| o.is_err()), "one result a row: no guessing");
    assert_eq!(samples.reclaim().await.unwrap(), 2);
    assert_eq!(server.resident().await, 1);
}

#[tokio::test]
async fn an_answer_that_comes_twice_is_refused_and_leaves_nothing() {
    let (server, url) = Server::start(&[Does::Twice], Does::Good).await;
    let Client { samples, client, .. } = client(&server, &url);
    let answer = client.capture(&url, tasks(2)).await;
    for (_, outcome) in &answer.prompts {
        let error = outcome.as_ref().unwrap_err();
        assert!(error.to_string().contains("not one row per prompt"), "{error}");
    }
    assert_eq!((samples.health().resident_samples, samples.health().provisional), (0, 2));
    assert_eq!(samples.reclaim().await.unwrap(), 2);
    assert_eq!(server.resident().await, 0);
}

/// Serial: what is captured is published once captures rest, and they rest until it is settled.
#[tokio::test(flavor = "multi_thread")]
async fn without_overlap_captures_rest_while_consumers_read() {
    let (server, url) = Server::start(&[], Does::Good).await;
    let Client { samples, client, .. } = client(&server, &url);
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&[&url]);
    options.ordered = false;
    options.overlap = false;
    let captured = Arc::new(Mutex::new(0_u64));
    let counting = captured.clone();
    let producer = Producer::new(options, client, samples, folder.path(), marks()).unwrap();
    let producer = producer.watched(move |_| *counting.lock() += 1);
    let running = tokio::spawn(producer.run(List::new(30)));
    let mut reader = RefReader::open(folder.path()).unwrap();
    let mut seen = 0;
    while seen < 30 {
        let polled = reader.poll(100).unwrap();
        if polled.refs.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        }
        seen += polled.refs.len() as u64;
        let before = *captured.lock();
        tokio::time::sleep(Duration::from_millis(50)).await;
        let polled = reader.poll(100).unwrap();
        seen += polled.refs.len() as u64; // of the same publication
        assert_eq!((seen, *captured.lock()), (before, before), "all of it, and nothing more");
        reader.settle(seen).unwrap();
    }
    let produced = running.await.unwrap().unwrap();
    assert_eq!((produced.published, server.resident().await), (30, 30));
}

/// What would not fit into the arenas is not sent; where nothing would make room, that is an error.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_sent_that_does_not_fit_beside_what_is_not_settled() {
    let room = |count: usize| (0..count).map(|i| layout().bytes(task(i).tokens())).sum::<u64>();
    for (fits, ends_well) in [(6, true), (2, false)] {
        let (server, url) = Server::start(&[], Does::Good).await;
        let Client { samples, client, .. } = client(&server, &url);
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(&[&url]);
        options.arenas = vec![room(fits)];
        options.routing = Routing::MostRoom;
        let producer = Producer::new(options, client, samples, folder.path(), marks()).unwrap();
        let running = tokio::spawn(producer.run(List::new(20)));
        let mut reader = RefReader::open(folder.path()).unwrap();
        let (mut seen, mut most, mut settled) = (0, 0, 0);
        let error = loop {
            match reader.poll(100) {
                Ok(polled) if polled.ended => break None,
                Ok(polled) => seen += polled.refs.len() as u64,
                Err(error) => break Some(error),
            }
            most = most.max(seen - settled);
            tokio::time::sleep(Duration::from_millis(10)).await;
            settled = seen / 4 * 4; // whole windows
            reader.settle(settled).unwrap();
        };
        let outcome = running.await.unwrap();
        assert_eq!((outcome.is_ok(), error.is_none()), (ends_well, ends_well), "{outcome:?}");
        if ends_well {
            assert!((4..=8).contains(&most), "{most} in room for {fits}");
        } else {
            let error = outcome.unwrap_err();
            assert!(error.to_string().contains("smaller quantum"), "{error}");
            assert_eq!(error.context("unacknowledged_samples"), Some("2"), "{error}");
        }
    }
}

#[tokio::test]
async fn a_late_answer_is_a_failure_and_is_reclaimed() {
    let (server, url) = Server::start(&[Does::Late], Does::Good).await;
    let timeout = Duration::from_millis(100);
    let Client { samples, client, .. } = client_with(&server, &url, Retention::default(), timeout);
    let answer = client.capture(&url, tasks(1)).await;
    let error = answer.prompts[0].1.as_ref().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    tokio::time::sleep(Duration::from_millis(500)).await;
    samples.reclaim().await.unwrap();
    assert_eq!(server.resident().await, 0);
}

struct List(VecDeque<Task>, HashMap<SampleId, Task>);

impl List {
    fn new(count: usize) -> Box<Self> {
        let all = tasks(count);
        let known = all.iter().map(|task| (task.sample_id.clone(), task.clone())).collect();
        Box::new(Self(all.into(), known))
    }
}

impl Prompts for List {
    fn next(&mut self) -> Result<Option<Task>> {
        Ok(self.0.pop_front())
    }
    fn again(&mut self, id: &SampleId) -> Result<Option<Task>> {
        Ok(self.1.get(id).cloned())
    }
}

/// Settles everything as it is published; the ids in the order of publication.
async fn settle_all(folder: &std::path::Path, end: usize) -> Vec<String> {
    let mut reader = RefReader::open(folder).unwrap();
    let mut ids = Vec::new();
    for _ in 0..2000 {
        // A producer that fails ends the channel for its readers; what it published stays there.
        let Ok(polled) = reader.poll(100) else { return published(folder) };
        ids.extend(polled.refs.iter().map(|r| r.sample_id.to_string()));
        reader.settle(ids.len() as u64).unwrap();
        if polled.ended || ids.len() >= end {
            return ids;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("only {} published", ids.len());
}

fn published(folder: &std::path::Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("refs.jsonl")).unwrap();
    let id = |line: &str| SampleRef::parse(line.as_bytes()).unwrap().sample_id.to_string();
    text.lines().map(id).collect()
}

fn options(urls: &[&String]) -> ProducerOptions {
    let mut options = ProducerOptions::new(urls.iter().map(ToString::to_string).collect(), "run");
    options.poll = Duration::from_millis(5);
    options.lease = 3;
    options.concurrency = 2;
    options.pause = Duration::from_millis(5);
    options
}

fn marks() -> Watermarks {
    Watermarks::new(12, 8, 4)
}

#[tokio::test(flavor = "multi_thread")]
async fn d18_two_servers_are_disjoint_complete_and_in_order_and_one_may_die() {
    let (one, a) = Server::start(&[], Does::Good).await;
    let (two, b) = Server::over(one.publisher.clone(), &[Does::Good], Does::Broken).await;
    let Client { samples, client, .. } = client(&one, &a);
    let folder = tempfile::tempdir().unwrap();
    let producer =
        Producer::new(options(&[&a, &b]), client, samples.clone(), folder.path(), marks()).unwrap();
    let running = tokio::spawn(producer.run(List::new(60)));
    let ids = settle_all(folder.path(), usize::MAX).await;
    let produced = running.await.unwrap().unwrap();
    let expected: Vec<_> = (0..60).map(|i| format!("run:task-{i}")).collect();
    assert_eq!(ids, expected, "ordered, each once");
    assert_eq!((produced.published, produced.servers_dropped), (60, 1));
    assert!(produced.retries > 0 && produced.pauses > 0, "{produced:?}");
    assert_eq!(produced.host_payload_bytes, 0);
    assert!(one.seen.lock().len() >= 50 && two.seen.lock().len() >= 3);
    assert_eq!(samples.health().resident_samples, 0, "all handed over");
    assert_eq!(one.resident().await, 60, "and none freed by the producer");
}

#[tokio::test(flavor = "multi_thread")]
async fn d18_all_servers_dead_is_an_error_that_fails_the_channel() {
    let (server, url) = Server::start(&[], Does::Broken).await;
    let Client { samples, client, .. } = client(&server, &url);
    let folder = tempfile::tempdir().unwrap();
    let producer =
        Producer::new(options(&[&url]), client, samples, folder.path(), marks()).unwrap();
    let error = producer.run(List::new(50)).await.unwrap_err();
    assert!(error.to_string().contains("every capture server has failed"), "{error}");
    let error = RefReader::open(folder.path()).unwrap().poll(1).unwrap_err();
    assert!(error.to_string().contains("every capture server"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn d18_a_poisoned_prompt_is_terminal_and_the_others_are_published() {
    let (server, url) = Server::start(&[Does::WrongLayers], Does::Good).await;
    let Client { samples, client, .. } = client(&server, &url);
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(&[&url]);
    options.concurrency = 1;
    let producer = Producer::new(options, client, samples, folder.path(), marks()).unwrap();
    let running = tokio::spawn(producer.run(List::new(8)));
    let ids = settle_all(folder.path(), 7).await;
    let error = running.await.unwrap().unwrap_err();
    assert_eq!(error.context("sample_id"), Some("run:task-0"), "{error}");
    assert_eq!(ids.len(), 7);
    assert_eq!(server.resident().await, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn d18_the_hard_cap_frees_what_it_refuses() {
    let (server, url) = Server::start(&[], Does::Good).await;
    let retention = Retention { max_resident_bytes: Some(500), ..Retention::default() };
    let Client { samples, client, .. } =
        client_with(&server, &url, retention, Duration::from_secs(5));
    let folder = tempfile::tempdir().unwrap();
    let producer =
        Producer::new(options(&[&url]), client, samples, folder.path(), marks()).unwrap();
    let error = producer.run(List::new(8)).await.unwrap_err();
    assert!(error.to_string().contains("hard cap exceeded"), "{error}");
    let published = {
        let text = std::fs::read_to_string(folder.path().join("refs.jsonl")).unwrap();
        text.lines().count() as u64
    };
    assert_eq!(server.resident().await, published, "only what consumers own is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_publishes_what_is_missing_and_frees_what_was_under_way() {
    let (server, url) = Server::start(&[], Does::Good).await;
    let folder = tempfile::tempdir().unwrap();
    {
        // A life that published one sample and died between the capture of two more and theirs.
        let Client { client, .. } = client(&server, &url);
        let mut journal = Journal::open(folder.path()).unwrap();
        let all = tasks(3);
        journal.note(&url, all.iter().map(|task| &task.sample_id)).unwrap();
        let answer = client.capture(&url, all).await;
        let first = &answer.prompts[0].1.as_ref().unwrap().descriptor;
        let first = SampleRef::new(first, "run", None, "dspark").unwrap();
        RefWriter::open(folder.path()).unwrap().publish(&[first]).unwrap();
    }
    assert_eq!(server.resident().await, 3);
    let Client { samples, client, .. } = client(&server, &url);
    let producer =
        Producer::new(options(&[&url]), client, samples, folder.path(), marks()).unwrap();
    let running = tokio::spawn(producer.run(List::new(6)));
    let mut ids = settle_all(folder.path(), usize::MAX).await;
    let produced = running.await.unwrap().unwrap();
    assert_eq!((produced.skipped, produced.published), (1, 5));
    ids.sort();
    ids.dedup();
    assert_eq!((ids.len(), server.resident().await), (6, 6));
}

/// A life that published everything and then could not reach a server, or was killed: the next one
/// has nothing to publish any more, and frees what is left.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_after_the_end_only_cleans_up() {
    for failed in [false, true] {
        let (server, url) = Server::start(&[], Does::Good).await;
        let folder = tempfile::tempdir().unwrap();
        {
            let Client { client, .. } = client(&server, &url);
            let mut journal = Journal::open(folder.path()).unwrap();
            let all = tasks(3);
            journal.note(&url, all.iter().map(|task| &task.sample_id)).unwrap();
            let answer = client.capture(&url, all).await;
            let first = answer.prompts[0].1.as_ref().unwrap();
            let mut writer = RefWriter::open(folder.path()).unwrap();
            writer.publish(&[first.announce("run", Strategy::Dspark).unwrap()]).unwrap();
            if failed { writer.fail("out of prompts") } else { writer.close() }.unwrap();
        }
        assert_eq!(server.resident().await, 3);
        let Client { samples, client, .. } = client(&server, &url);
        let producer =
            Producer::new(options(&[&url]), client, samples, folder.path(), marks()).unwrap();
        match (failed, producer.run(List::new(6)).await) {
            (false, Ok(produced)) => assert_eq!(produced.published, 0),
            (true, Err(error)) => assert!(error.to_string().contains("out of prompts"), "{error}"),
            (_, outcome) => panic!("{outcome:?}"),
        }
        assert_eq!(server.resident().await, 1, "what is published belongs to the consumers");
        assert_eq!(Journal::open(folder.path()).unwrap().entries().len(), 0);
    }
}
