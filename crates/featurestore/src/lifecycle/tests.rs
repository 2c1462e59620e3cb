use std::sync::atomic::Ordering;

use async_trait::async_trait;
use indexmap::IndexMap;
use transport_core::{Dtype, FeatureName, MemoryTransport, StoreId, TensorMeta};

use super::*;
use crate::flaky::{Flaky, key, sample};

const DEADLINE: Duration = Duration::from_secs(10);

fn store(retention: Retention) -> (Arc<Flaky>, Samples) {
    let inner = MemoryTransport::builder().arena_bytes(1 << 20).build().unwrap();
    let flaky = Arc::new(Flaky::new(inner));
    (flaky.clone(), Samples::over(flaky, retention))
}

fn id(id: &str) -> SampleId {
    SampleId::new(id).unwrap()
}

async fn put(samples: &Samples, name: &str) -> Arc<Descriptor> {
    let batch = vec![sample(name, 1, name.as_bytes())];
    samples.put(batch, PublishOptions::default()).await.unwrap().remove(0)
}

async fn resident(flaky: &Flaky) -> u64 {
    flaky.inner.health().await.unwrap().resident_samples
}

#[tokio::test]
async fn a_sample_stays_until_it_is_settled_and_is_freed_once() {
    let (flaky, samples) = store(Retention::default());
    let a = put(&samples, "a").await;
    let leased = samples.get(&a, DEADLINE).await.unwrap();
    assert_eq!(leased.tensors["x"].data.as_ref(), b"a");
    let token = leased.token.clone();
    drop(leased);
    assert_eq!(samples.release(&token).await, Released::Returned);
    assert_eq!(samples.release(&token).await, Released::Unknown, "idempotent");
    assert_eq!(resident(&flaky).await, 1, "kept until the optimizer boundary");
    let again = samples.get(&a, DEADLINE).await.unwrap();
    drop(again);
    let freed = samples.abort(&id("a")).await;
    assert_eq!((freed.freed, freed.pending), (1, 0));
    assert_eq!(samples.abort(&id("a")).await.already_gone, 1);
    assert_eq!(resident(&flaky).await, 0);
    assert_eq!(samples.get(&a, DEADLINE).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(samples.adopt(&[a]).await.unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(samples.health().freed, 1);
}

#[tokio::test]
async fn without_retention_the_last_lease_frees_and_a_late_release_hurts_nobody() {
    let retention = Retention { retain: false, ..Retention::default() };
    let (flaky, samples) = store(retention);
    let a = put(&samples, "a").await;
    let first = samples.get(&a, DEADLINE).await.unwrap().token;
    let second = samples.get(&a, DEADLINE).await.unwrap().token;
    assert_ne!(first, second);
    assert_eq!(samples.release(&first).await, Released::Returned);
    assert_eq!(samples.release(&first).await, Released::Unknown, "not the other one's");
    assert_eq!(resident(&flaky).await, 1, "the second still reads");
    assert_eq!(samples.release(&second).await, Released::Freed);
    assert_eq!(resident(&flaky).await, 0);
}

#[tokio::test]
async fn consume_once_refuses_a_second_reading_until_it_is_put_again() {
    let retention = Retention { rereadable: false, ..Retention::default() };
    let (_, samples) = store(retention);
    let a = put(&samples, "a").await;
    let token = samples.get(&a, DEADLINE).await.unwrap().token;
    samples.release(&token).await;
    let error = samples.get(&a, DEADLINE).await.unwrap_err();
    assert!(error.to_string().contains("consumed"), "{error}");
}

#[tokio::test]
async fn a_stale_release_does_not_free_an_unconsumed_newer_life() {
    let (flaky, samples) = store(Retention { retain: false, ..Retention::default() });
    let old = put(&samples, "a").await;
    let token = samples.get(&old, DEADLINE).await.unwrap().token;
    let batch = vec![sample("a", 2, b"new")];
    let new = samples.put(batch, PublishOptions::default()).await.unwrap().remove(0);
    assert_eq!(samples.release(&token).await, Released::Unknown);
    assert_eq!(samples.get(&old, DEADLINE).await.unwrap_err().kind(), ErrorKind::NotFound);
    let read = samples.get(&new, DEADLINE).await.unwrap();
    assert_eq!(read.tensors["x"].data.as_ref(), b"new");
    drop(read);
    assert_eq!(resident(&flaky).await, 1, "the old generation is freed, the new one lives");
    let error = samples.adopt(&[old]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale);
}

#[tokio::test]
async fn the_hard_cap_refuses_before_anything_is_published() {
    let retention = Retention { max_resident_bytes: Some(3), ..Retention::default() };
    let (flaky, samples) = store(retention);
    put(&samples, "ab").await;
    let batch = vec![sample("cd", 1, b"cd")];
    let error = samples.put(batch, PublishOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CapacityExceeded);
    assert!(error.to_string().contains("hard cap exceeded"), "{error}");
    assert_eq!(resident(&flaky).await, 1);
    // Captured elsewhere, it is freed where it was captured.
    let options = PublishOptions::default();
    let captured = flaky.inner.publish(vec![sample("ef", 1, b"ef")], options).await.unwrap();
    let error = samples.adopt(&[Arc::new(captured[0].clone())]).await.unwrap_err();
    assert!(error.to_string().contains("hard cap exceeded"), "{error}");
    assert_eq!(resident(&flaky).await, 1);
    assert_eq!(samples.health().resident_bytes, 2);
}

#[tokio::test]
async fn a_free_that_fails_is_over_here_and_never_forgotten() {
    let (flaky, samples) = store(Retention::default());
    let (a, b) = (put(&samples, "a").await, put(&samples, "b").await);
    flaky.broken.store(true, Ordering::Relaxed);
    let freed = samples.abort_many(&[id("a"), id("unknown"), id("b")]).await;
    assert_eq!((freed.freed, freed.already_gone, freed.pending), (0, 1, 2));
    assert_eq!(samples.get(&a, DEADLINE).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(samples.health().resident_samples, 0);
    for _ in 0..10 {
        assert_eq!(samples.gc(Instant::now()).await.release_pending, 2);
    }
    let (_, left) = samples.retry_frees(Some(&[id("b")])).await;
    assert_eq!(left, [id("b")]);
    flaky.broken.store(false, Ordering::Relaxed);
    let (freed, left) = samples.retry_frees(Some(&[id("b")])).await;
    assert_eq!((freed.freed, left.len()), (1, 0));
    assert_eq!(samples.drain(None, 1, Duration::ZERO).await.unwrap().freed, 1);
    assert_eq!(resident(&flaky).await, 0);
    drop((a, b));
}

#[tokio::test]
async fn what_becomes_pending_while_its_key_is_being_freed_stays_so() {
    let (_, samples) = store(Retention::default());
    let first = put(&samples, "a").await;
    samples.abort(&id("a")).await;
    let second = put(&samples, "a").await;
    assert_eq!(first.sample, second.sample);
    let mut books = Residents::new(Retention::default());
    books.settle(std::slice::from_ref(&first)); // and its server is asked to
    books.settle(std::slice::from_ref(&second));
    books.confirm(std::slice::from_ref(&first));
    assert!(Arc::ptr_eq(&books.pending[&second.sample], &second));
    books.confirm(&[second, first]);
    assert!(books.pending.is_empty());
}

#[tokio::test]
async fn a_step_of_many_parts_is_freed_here_before_anything_is_waited_for() {
    let (flaky, samples) = store(Retention::default());
    let mut step = Vec::new();
    for i in 0..2 * PART + 7 {
        step.push(put(&samples, &format!("s{i}")).await);
    }
    flaky.stalled.store(true, Ordering::Relaxed);
    let mut settling = Box::pin(samples.settle(&step));
    assert!(poll_fn(|cx| Poll::Ready(settling.as_mut().poll(cx))).await.is_pending());
    let health = samples.health();
    assert_eq!((health.resident_samples, health.release_pending), (0, step.len() as u64));
    drop(settling); // nothing is forgotten with it
    flaky.stalled.store(false, Ordering::Relaxed);
    flaky.broken.store(true, Ordering::Relaxed);
    let freed = samples.settle(&step).await;
    assert_eq!((freed.freed, freed.already_gone, freed.pending), (0, 0, step.len() as u64));
    flaky.broken.store(false, Ordering::Relaxed);
    let freed = samples.settle(&step).await;
    assert_eq!((freed.freed, freed.already_gone, freed.pending), (step.len() as u64, 0, 0));
    assert_eq!((samples.release_pending(), resident(&flaky).await), (0, 0));
    assert_eq!(samples.settle(&[]).await, Freed::default());
}

#[tokio::test]
async fn d11_a_drain_is_bounded_and_hides_no_leak() {
    let (flaky, samples) = store(Retention::default());
    put(&samples, "a").await;
    flaky.broken.store(true, Ordering::Relaxed);
    samples.abort(&id("a")).await;
    let before = Instant::now();
    let error = samples.drain(None, 2, Duration::ZERO).await.unwrap_err();
    assert!(before.elapsed() < Duration::from_millis(200), "a zero interval never sleeps");
    assert!(error.to_string().contains("could not drain 1 pending"), "{error}");
    assert_eq!(error.context("samples"), Some("a"));
    assert_eq!(samples.health().release_pending, 1);
    assert_eq!(samples.health().force_freed, 0);
    assert!(samples.drain(None, 0, Duration::ZERO).await.is_err());
}

#[tokio::test]
async fn d10_settling_frees_the_durable_and_spares_the_prefetched() {
    let (flaky, samples) = store(Retention::default());
    put(&samples, "durable").await;
    let prefetched = put(&samples, "prefetched").await;
    flaky.broken.store(true, Ordering::Relaxed);
    samples.abort(&id("durable")).await;
    assert_eq!(samples.health().release_pending, 1);
    assert_eq!(samples.health().resident_samples, 1);
    flaky.broken.store(false, Ordering::Relaxed);
    samples.drain(Some(&[id("durable")]), 8, Duration::ZERO).await.unwrap();
    assert!(samples.get(&prefetched, DEADLINE).await.is_ok());
    assert_eq!(resident(&flaky).await, 1);
}

#[tokio::test]
async fn gc_frees_what_is_held_too_long_and_spares_what_is_read() {
    let retention = Retention {
        max_hold: Some(Duration::from_secs(60)),
        lease: Some(Duration::from_secs(600)),
        ..Retention::default()
    };
    let (flaky, samples) = store(retention);
    let (a, _b) = (put(&samples, "a").await, put(&samples, "b").await);
    let token = samples.get(&a, DEADLINE).await.unwrap().token;
    let now = Instant::now();
    assert_eq!(samples.gc(now).await.force_freed, 0);
    let done = samples.gc(now + Duration::from_secs(61)).await;
    assert_eq!((done.force_freed, done.force_freed_bytes, done.release_pending), (1, 1, 0));
    assert_eq!(resident(&flaky).await, 1, "a is read");
    let done = samples.gc(now + Duration::from_secs(601)).await;
    assert_eq!((done.expired_leases, done.force_freed), (1, 1), "its reader vanished");
    assert_eq!(samples.release(&token).await, Released::Unknown);
    assert_eq!(resident(&flaky).await, 0);
}

#[tokio::test]
async fn a_failed_or_dropped_reading_leaves_no_lease() {
    let (flaky, samples) = store(Retention::default());
    let a = put(&samples, "a").await;
    let names = Some(vec![FeatureName::new("nope").unwrap()]);
    assert!(samples.get_names(&a, names, DEADLINE).await.is_err());
    assert_eq!(samples.health().active_leases, 0);
    let reading = samples.get(&a, DEADLINE);
    drop(reading); // never polled
    flaky.stalled.store(true, Ordering::Relaxed);
    let mut reading = Box::pin(samples.get(&a, DEADLINE));
    let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(reading.as_mut().poll(cx)));
    assert!(polled.await.is_pending());
    assert_eq!(samples.health().active_leases, 1);
    drop(reading);
    assert_eq!(samples.health().active_leases, 0);
}

#[tokio::test]
async fn what_was_freed_costs_bounded_memory() {
    let (_, samples) = store(Retention { remembered: 100, ..Retention::default() });
    for i in 0..1000 {
        let name = format!("s{i}");
        put(&samples, &name).await;
        assert_eq!(samples.abort(&id(&name)).await.freed, 1);
    }
    let health = samples.health();
    assert_eq!((health.remembered, health.resident_samples, health.freed), (100, 0, 1000));
}

#[derive(Debug, Default)]
struct Servers {
    asked: Mutex<Vec<(String, String)>>,
    down: Mutex<Option<String>>,
}

#[async_trait]
impl Reclaim for Servers {
    async fn reclaim(&self, place: &str, sample: &SampleKey) -> Result<()> {
        if self.down.lock().as_deref() == Some(place) {
            return Err(Error::new(ErrorKind::PeerGone, "reclaim", "metadata unavailable"));
        }
        self.asked.lock().push((place.into(), sample.to_string()));
        Ok(())
    }
}

#[tokio::test]
async fn d6_a_lost_answer_is_reclaimed_on_every_replica_and_kept_until_all_were_asked() {
    let servers = Arc::new(Servers::default());
    let (_, samples) = store(Retention::default());
    let samples = samples.reclaiming(servers.clone());
    samples.track("http://one", [&key("a", 1)]);
    samples.track("http://two", [&key("a", 1)]); // the retry went elsewhere
    samples.track("http://one", [&key("b", 1)]);
    assert_eq!(samples.health().provisional, 2);
    *servers.down.lock() = Some("http://two".into());
    let error = samples.reclaim().await.unwrap_err();
    assert!(error.to_string().contains("metadata unavailable"), "{error}");
    assert_eq!(samples.health().provisional, 1, "two may still hold a");
    *servers.down.lock() = None;
    assert_eq!(samples.reclaim().await.unwrap(), 1);
    assert_eq!(samples.reclaim().await.unwrap(), 0);
    let mut asked = servers.asked.lock().clone();
    asked.sort();
    let on = |place: &str, id: &str| (format!("http://{place}"), format!("run/{id}/g1"));
    assert_eq!(asked, [on("one", "a"), on("one", "b"), on("two", "a")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn reading_and_freeing_at_once_is_gone_or_read_never_a_panic() {
    let (_, samples) = store(Retention::default());
    let samples = Arc::new(samples);
    for i in 0..50 {
        let name = format!("s{i}");
        let descriptor = put(&samples, &name).await;
        let (reader, freer) = (samples.clone(), samples.clone());
        let reading = tokio::spawn(async move { reader.get(&descriptor, DEADLINE).await });
        let freeing = tokio::spawn(async move { freer.abort(&id(&name)).await });
        match reading.await.unwrap() {
            Ok(leased) => drop(leased),
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
        }
        assert_eq!(freeing.await.unwrap().freed, 1);
    }
    assert_eq!(samples.health().release_pending, 0);
}

/// A token server that knows no batches, and how many samples it has freed.
fn token_server() -> (transport_core::SessionName, Arc<Mutex<u64>>) {
    use std::io::{BufRead, BufReader, Write};

    use control_proto::token::{Reply, Request, UNSUPPORTED_OPERATION};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let control = listener.local_addr().unwrap().to_string().parse().unwrap();
    let freed = Arc::new(Mutex::new(0));
    let count = freed.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                line.pop();
                let reply = match Request::parse(&line).unwrap() {
                    Request::One { .. } => {
                        *count.lock() += 1;
                        Reply::Freed { freed_bytes: 1, released_samples: 1 }
                    }
                    _ => Reply::Refused { error: UNSUPPORTED_OPERATION.into() },
                };
                line.clear();
                let mut out = Vec::new();
                reply.write(&mut out);
                stream.write_all(&out).unwrap();
            }
        }
    });
    (control, freed)
}

#[tokio::test]
async fn samples_behind_tokens_and_in_arenas_are_settled_together() {
    use transport_core::{FeatureDescriptor, RemoteAddr, TokenLocation};
    let (control, freed) = token_server();
    let (flaky, samples) = store(Retention::default());
    let in_arena = put(&samples, "a").await;
    let behind = |name: &str| {
        let meta = TensorMeta::new(Dtype::Uint8, [1]).unwrap();
        let feature = FeatureDescriptor::new(meta, Some(RemoteAddr(512)), None);
        let features = IndexMap::from([(FeatureName::new("x").unwrap(), feature)]);
        let place = TokenLocation::new("rdma", control.clone(), control.clone(), "hush");
        let location = Location::Token(place);
        Arc::new(Descriptor::new(key(name, 1), features, None, location).unwrap())
    };
    let all = [behind("b"), in_arena, behind("c")];
    samples.adopt(&[all[0].clone(), all[2].clone()]).await.unwrap();
    let outcome = samples.settle(&all).await;
    assert_eq!((outcome.freed, outcome.pending), (3, 0));
    assert_eq!(*freed.lock(), 2);
    assert_eq!(resident(&flaky).await, 0);
}

/// One handle given back twice, and one after its time: neither ends what another reader has.
#[tokio::test]
async fn f52_a_late_or_repeated_release_never_ends_another_lease() {
    let retention =
        Retention { retain: false, lease: Some(Duration::from_secs(10)), ..Retention::default() };
    let (flaky, samples) = store(retention);
    let sample = put(&samples, "s").await;
    let first = samples.get(&sample, DEADLINE).await.unwrap().token;
    let other = samples.get(&sample, DEADLINE).await.unwrap().token;
    assert_eq!(samples.release(&first).await, Released::Returned);
    assert_eq!(samples.release(&first).await, Released::Unknown, "twice");
    assert_eq!((samples.health().active_leases, resident(&flaky).await), (1, 1));
    let swept = samples.gc(Instant::now() + Duration::from_secs(11)).await;
    assert_eq!(swept.expired_leases, 1);
    assert_eq!(samples.release(&other).await, Released::Unknown, "after its time");
    let again = put(&samples, "t").await;
    let reading = samples.get(&again, DEADLINE).await.unwrap();
    assert_eq!(samples.release(&other).await, Released::Unknown);
    assert_eq!(reading.tensors["x"].data.as_ref(), b"t");
    flaky.inner.close().await.unwrap();
    assert_eq!(samples.release(&reading.token).await, Released::Freed, "here; the store is closed");
}

/// A list with one that is unknown, one that is gone, and one of another store: all others go.
#[tokio::test]
async fn f54_a_batch_is_freed_past_the_entries_that_cannot_be() {
    let (flaky, samples) = store(Retention::default());
    let (a, b) = (put(&samples, "a").await, put(&samples, "b").await);
    samples.abort(&id("a")).await;
    let mut foreign = (*b).clone();
    foreign.sample.store_id = StoreId::new("other").unwrap();
    let outcome = samples.settle(&[a, Arc::new(foreign), b]).await;
    assert_eq!((outcome.freed, outcome.already_gone, outcome.pending), (1, 2, 0));
    assert_eq!(samples.abort_many(&[id("nobody"), id("b")]).await.already_gone, 2);
    assert_eq!(resident(&flaky).await, 0);
}
