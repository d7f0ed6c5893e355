import type { AnnotationQuery, Dashboard, DataQuery } from '@grafana/schema';

// JSON has strings where the schema has enums; every data source adds its own fields to DataQuery,
// and Prometheus adds the title to AnnotationQuery. Everything else must be in the schema.
type Plain<T> = T extends DataQuery ? DataQuery & Record<string, unknown>
  : T extends AnnotationQuery ? Fields<T> & { titleFormat?: string }
  : T extends string ? `${T}`
  : T extends number ? number
  : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? Fields<T>
  : T;
type Fields<T> = { [K in keyof T]: Plain<T[K]> };

export type Board = Plain<Dashboard>;
