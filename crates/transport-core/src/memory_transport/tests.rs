//! What the conformance suite cannot see from outside.

use super::*;
use crate::{Dtype, FeatureName, Generation, SampleId, SampleKey, StoreId, TensorMeta};

const SECOND: Duration = Duration::from_secs(1);

fn sample(name: &str, bytes: u64) -> Publication {
    let key =
        SampleKey::new(StoreId::new("s").unwrap(), SampleId::new(name).unwrap(), Generation(1));
    let meta = TensorMeta::new(Dtype::Uint8, [bytes]).unwrap();
    let data = RegionSlice::copy_of(&vec![7; bytes as usize]);
    let tensors = [(FeatureName::new("x").unwrap(), Tensor::new(meta, data).unwrap())];
    Publication::new(key, tensors.into_iter().collect(), Ready::Now)
}

fn owner(arena_bytes: u64) -> MemoryTransport {
    MemoryTransport::builder().arena_bytes(arena_bytes).build().unwrap()
}

async fn publish(owner: &MemoryTransport, sample: Publication) -> Arc<Descriptor> {
    let options = PublishOptions::default().deadline(SECOND);
    Arc::new(owner.publish(vec![sample], options).await.unwrap().remove(0))
}

async fn view(client: &MemoryTransport, descriptor: &Arc<Descriptor>) -> Result<Fetched> {
    let request = FetchRequest::new(descriptor.clone(), crate::Destination::View);
    Ok(client.fetch(vec![request], FetchOptions::default()).await?.remove(0))
}

async fn free(owner: &MemoryTransport) -> u64 {
    owner.health().await.unwrap().arena_free_bytes
}

#[tokio::test]
async fn an_impossible_arena_is_refused() {
    for bytes in [None, Some(0), Some(511), Some(u64::MAX)] {
        let builder = MemoryTransportBuilder { arena_bytes: bytes, ..MemoryTransport::builder() };
        assert_eq!(builder.build().unwrap_err().kind(), ErrorKind::ConfigInvalid, "{bytes:?}");
    }
    assert_eq!(free(&owner(1023)).await, 512);
}

#[tokio::test]
async fn another_owner_does_not_know_the_sample() {
    let (a, b) = (owner(4096), owner(4096));
    let descriptor = publish(&a, sample("x", 8)).await;
    publish(&b, sample("x", 8)).await;
    let error = view(&b, &descriptor).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale);
    assert!(error.context("expected").unwrap().contains("epoch"), "{error}");
    assert_eq!(b.release(vec![descriptor.into()]).await.unwrap().stale, 1);
    assert_eq!(b.health().await.unwrap().resident_samples, 1);
}

#[tokio::test]
async fn a_view_that_outlives_its_release_keeps_its_room() {
    let owner = owner(4096);
    let descriptor = publish(&owner, sample("x", 4096)).await;
    let fetched = view(&owner, &descriptor).await.unwrap();
    assert_eq!(owner.release(vec![descriptor.into()]).await.unwrap().deferred, 1);
    assert_eq!(free(&owner).await, 0);
    let part = fetched.tensors[0].data.slice(100..101).unwrap();
    drop(fetched);
    assert_eq!((free(&owner).await, part.as_ref()), (0, &[7][..]));
    drop(part);
    assert_eq!(free(&owner).await, 4096);
}

#[tokio::test]
async fn a_client_that_leaves_gives_back_its_holds() {
    let owner = owner(4096);
    for closes in [false, true] {
        let client = owner.client();
        let descriptor = publish(&owner, sample("x", 8)).await;
        view(&client, &descriptor).await.unwrap();
        owner.release(vec![descriptor.clone().into()]).await.unwrap();
        assert_eq!(owner.health().await.unwrap().resident_samples, 1, "the client holds it");
        assert_eq!(owner.health().await.unwrap().connected_peers, 1);
        if closes {
            client.close().await.unwrap();
        }
        drop(client);
        let health = owner.health().await.unwrap();
        assert_eq!((health.resident_samples, health.connected_peers), (0, 0));
    }
}

#[tokio::test]
async fn a_sample_is_held_for_its_named_holder() {
    let owner = owner(4096);
    let (holder, other) = (owner.client(), owner.client());
    let publication = sample("x", 8).held_by(holder.client_id().clone());
    let descriptor = publish(&owner, publication).await;
    let Location::Arena(arena) = &descriptor.location else { panic!("not an arena") };
    assert_eq!(arena.holder.as_ref(), Some(holder.client_id()));
    // Released by another client before its holder has even fetched it.
    other.release(vec![descriptor.clone().into()]).await.unwrap();
    assert_eq!(view(&other, &descriptor).await.unwrap_err().kind(), ErrorKind::NotFound);
    view(&holder, &descriptor).await.unwrap();
    assert_eq!(holder.release(vec![descriptor.into()]).await.unwrap().released, 1);
    assert_eq!(owner.health().await.unwrap().resident_samples, 0);
}

#[tokio::test]
async fn a_second_release_takes_nothing_from_other_holders() {
    let owner = owner(4096);
    let (a, b) = (owner.client(), owner.client());
    let descriptor = publish(&owner, sample("x", 8)).await;
    view(&a, &descriptor).await.unwrap();
    view(&b, &descriptor).await.unwrap();
    for (released, gone) in [(1, 0), (0, 1), (0, 1)] {
        let report = a.release(vec![descriptor.clone().into()]).await.unwrap();
        assert_eq!((report.released, report.already_gone), (released, gone));
        view(&owner, &descriptor).await.expect("still published");
    }
}

#[tokio::test]
async fn a_failed_fetch_holds_nothing() {
    let owner = owner(4096);
    let client = owner.client();
    let good = publish(&owner, sample("good", 8)).await;
    let gone = publish(&owner, sample("gone", 8)).await;
    owner.release(vec![gone.clone().into()]).await.unwrap();
    let requests = [&good, &gone].map(|d| FetchRequest::new(d.clone(), crate::Destination::View));
    client.fetch(requests.into(), FetchOptions::default()).await.unwrap_err();
    // One that was dropped on its way holds nothing either.
    let slow = MemoryTransport::builder().arena_bytes(4096).transfer_delay(SECOND / 10);
    let slow = slow.build().unwrap();
    let late = publish(&slow, sample("late", 8)).await;
    let consumer = slow.client();
    let request = FetchRequest::new(late.clone(), crate::Destination::Pool);
    let fetch = consumer.fetch(vec![request], FetchOptions::default());
    tokio::time::timeout(SECOND / 100, fetch).await.unwrap_err();
    for (owner, descriptor) in [(&owner, good), (&slow, late)] {
        owner.release(vec![descriptor.into()]).await.unwrap();
    }
    assert_eq!(owner.health().await.unwrap().resident_samples, 0);
    slow.close().await.unwrap(); // waits for the copy
}

#[tokio::test]
async fn room_is_given_first_come_first_served() {
    let owner = Arc::new(owner(4096));
    let first = publish(&owner, sample("first", 4096)).await;
    let wait = |name, bytes| {
        let owner = owner.clone();
        tokio::spawn(async move { publish(&owner, sample(name, bytes)).await })
    };
    let large = wait("large", 4096);
    tokio::task::yield_now().await;
    let small = wait("small", 8);
    tokio::task::yield_now().await;
    owner.release(vec![first.into()]).await.unwrap();
    let large = large.await.unwrap();
    assert!(!small.is_finished(), "the small one must not overtake the large one");
    owner.release(vec![large.into()]).await.unwrap();
    small.await.unwrap();
}

#[tokio::test]
async fn an_owner_that_goes_takes_its_samples_along() {
    let owner = owner(4096);
    let client = owner.client();
    let descriptor = publish(&owner, sample("x", 8)).await;
    let fetched = view(&client, &descriptor).await.unwrap();
    drop(owner);
    let error = view(&client, &descriptor).await.unwrap_err();
    assert_eq!((error.kind(), error.is_temporary()), (ErrorKind::PeerGone, false));
    assert_eq!(fetched.tensors[0].data.as_ref(), [7; 8], "a view keeps its memory");
}

#[tokio::test]
async fn health_tells_the_newest_failure() {
    let owner = owner(4096);
    assert_eq!(owner.health().await.unwrap().last_error, None);
    let empty = Publication { tensors: IndexMap::new(), ..sample("x", 0) };
    let error = owner.publish(vec![empty], PublishOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(owner.health().await.unwrap().last_error, Some(error.to_string()));
}
