//! What earlier lives of a producer may have left.

use std::collections::HashSet;

use transport_core::{Result, SampleId};

use super::{Producer, Task};

impl Producer {
    /// Frees what earlier lives of this producer may have left on servers. Also at the end: a server
    /// may have finished a capture of an earlier life later than this one began.
    pub(super) async fn recover(&mut self) -> Result<()> {
        let ids: HashSet<SampleId> = self.earlier.iter().map(|(_, id)| id.clone()).collect();
        let newest = self.writer().newest(&ids)?;
        let lost = self.writer().lost()?;
        for (url, id) in self.earlier.clone() {
            // What consumers own stays; another server may still have its own of the same name.
            let owned = newest.get(&id).filter(|_| !self.writer().wants(&id, &lost));
            let here = match owned {
                Some(sample) => self.client.is_at(&url, &sample.descriptor()?),
                None => false,
            };
            if !here {
                let key = self.client.key(&Task::new(id, Vec::new(), Vec::new()));
                self.samples.track(&url, [&key]);
            }
        }
        Ok(())
    }
}
