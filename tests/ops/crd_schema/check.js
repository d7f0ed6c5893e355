// Judges objects of the Prometheus operator (a JSON array in the file named) by the schemas of its CRDs.
import { readFileSync } from "node:fs";
import * as monitoring from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

for (const found of JSON.parse(readFileSync(process.argv[2], "utf8"))) {
  const model = new monitoring[found.kind](found);
  model.validate();
  console.log(`valid: ${found.kind} ${found.metadata.name}`);
}
